"""Batches of prompts. The batch of a step depends only on the step and the seed.

A resumed run therefore needs to restore no position in the data.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import numpy as np

from grpo_jax.data.images.batches import HostImages
from grpo_jax.data.images.of_prompts import needed_sizes
from grpo_jax.data.prompts import ONE_PROCESS, Processes, Prompt, PromptSet
from grpo_jax.data.tokenizers.tokenizer import Tokenizer
from grpo_jax.settings import ConfigError, ConfigStopsRun, RunFailed

_SORTED = 2**25  # the most examples whose order is computed by sorting, which takes seconds
_ROUNDS = 6  # rounds of the Feistel network that orders a longer epoch


@dataclasses.dataclass(frozen=True)
class PromptBatch:
  """P prompts of at most S tokens.

  Attributes:
    prompts_PS: int32, right-padded.
    prompt_lengths_P: int32, the number of tokens before the padding.
    own: The rows that this process scores. Empty if nothing is scored.
    columns: The arguments of reward functions (see grpo_jax/rewards), keyed by name. Each is a list
      with one entry for each of the rows `own`.
    load_images: Returns the value of `images`, or raises RunFailed.
    visual: `types.Visual` on the mesh, if `images` are already encoded, or None.
  """

  prompts_PS: np.ndarray
  prompt_lengths_P: np.ndarray
  own: slice = dataclasses.field(default_factory=lambda: slice(0, 0))
  columns: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
  load_images: Callable[[], HostImages | None] = lambda: None
  visual: Any = None

  @functools.cached_property
  def images(self) -> HostImages | None:
    """The images of all P prompts, or None if no prompt has images. Waits until they are decoded.

    All processes must read it together, because they exchange their rows.

    Raises:
      RunFailed: An image is damaged.
    """
    return self.load_images()

  def row(self, p: int) -> dict[str, Any]:
    """The columns of prompt p, which must be one of the rows `own`."""
    return {name: values[p - self.own.start] for name, values in self.columns.items()}


@dataclasses.dataclass(frozen=True)
class SupervisedBatch:
  """P prompts with solutions to imitate, of at most T tokens including the stop token.

  Attributes:
    prompts: The prompts.
    completions_PT: int32, the solutions, right-padded.
    mask_PT: float32, 1 on the tokens of the solution and 0 on padding. The row of a solution with
      more than T tokens is all 0.
    dropped: How many solutions have more than T tokens.
  """

  prompts: PromptBatch
  completions_PT: np.ndarray
  mask_PT: np.ndarray
  dropped: int


def step_indices(seed: int, step: int, count: int, size: int) -> np.ndarray:
  """The indices of the examples that a step uses, int64 [count].

  Every epoch visits the examples in a new random order. Example i of step s has position
  p = s * count + i in the run, which is entry p % size of the permutation of epoch p // size. So
  every epoch has every example exactly once, even if it ends in the middle of a step.

  Args:
    seed: The seed of the permutations.
    step: The number of the step, from 0.
    count: How many examples a step uses.
    size: How many examples the split has.
  """
  return indices_at(seed, step * count + np.arange(count), size)


def indices_at(seed: int, positions: np.ndarray, size: int) -> np.ndarray:
  """The indices of the examples at positions of the order that `step_indices` describes.

  Args:
    seed: The seed of the permutations.
    positions: The positions in the run, int64, one axis.
    size: How many examples the split has.

  Returns:
    The indices, int64, with the shape of `positions`.
  """
  epochs = positions // size
  indices = np.empty(len(positions), np.int64)
  for epoch in np.unique(epochs):
    in_epoch = epochs == epoch
    places = positions[in_epoch] % size
    if size <= _SORTED:
      indices[in_epoch] = _permutation(seed, int(epoch), size)[places]
    else:
      indices[in_epoch] = _permutation_at(seed, int(epoch), size, places)
  return indices


def prompt_batch(
  prompts: PromptSet, indices: np.ndarray, processes: Processes = ONE_PROCESS
) -> PromptBatch:
  """Makes the batch of the prompts at `indices`, an integer array [P].

  Each process tokenizes some of the rows. All processes receive all tokens. Threads decode the
  images, for which `PromptBatch.images` waits. Raises RunFailed if a prompt cannot be made.
  """
  own = processes.own_rows(len(indices))
  made = processes.on_each(lambda: prompts.make(indices[own]))
  columns: dict[str, list[Any]] = {"prompts": [prompt.text for prompt in made]}
  for field in prompts.fields:
    columns[field] = [prompt.example[field] for prompt in made]
  if all(prompt.messages for prompt in made):  # with data.chat
    columns["messages"] = [prompt.messages for prompt in made]
  tokens = [prompt.ids for prompt in made]
  prompts_PS, lengths_P = processes.join_rows(
    (_pad(tokens, prompts.max_tokens, prompts.pad_id), np.array([*map(len, tokens)], np.int32))
  )
  if prompts.images is None:
    return PromptBatch(prompts_PS, lengths_P, own, columns)
  prompts.images.begin(made)
  load = functools.partial(_images, prompts, made, prompts.max_tokens, processes)
  return PromptBatch(prompts_PS, lengths_P, own, columns, load)


def _images(
  prompts: PromptSet, made: Sequence[Prompt], max_tokens: int, processes: Processes
) -> HostImages | None:
  """The images of the prompts of all processes, or None if no prompt has images.

  `made` are the prompts of this process. All processes pad to the same sizes, to S = `max_tokens`.
  """
  # The most pictures of a prompt and the most visual tokens of a picture, over all processes.
  needed = processes.join_rows(needed_sizes(made)).max(0)
  if not needed[0]:
    return None

  def arrays() -> HostImages:  # in `on_each`, so that all processes raise
    sizes = int(needed[0]), int(needed[1])
    try:
      return prompts.images.arrays(made, max_tokens, sizes, prompts.most_images)
    except ConfigError as error:  # after the start, RunFailed lets the run save its state
      raise RunFailed(str(error)) from error

  return processes.join_rows(processes.on_each(arrays))


def supervised_batch(
  prompts: PromptSet,
  indices: np.ndarray,
  tokenizer: Tokenizer,
  max_tokens: int,
  processes: Processes = ONE_PROCESS,
) -> SupervisedBatch:
  """Makes the batch of the prompts at `indices` with their solutions, for the warm start.

  The first stop id ends every solution. A solution that is too long is left out of the loss,
  because a truncated solution would teach the model not to stop.

  Args:
    prompts: The prompts of a split whose examples have a `solution`.
    indices: The indices of the prompts, an integer array [P].
    tokenizer: Encodes the solutions.
    max_tokens: T, the most tokens of a solution including the stop token.
    processes: The processes that share the tokenization.

  Raises:
    ConfigError: The tokenizer has no stop id, or the examples have no field `solution`.
    ConfigStopsRun: An example has no solution, or all solutions of the batch are too long.
  """
  if not tokenizer.stop_ids:
    raise ConfigError(
      "data.tokenizer names no end-of-sequence token, which the warm start must teach; add"
      " eos_token to its tokenizer_config.json"
    )
  batch = prompt_batch(prompts, indices, processes)
  if "solution" not in batch.columns:
    raise ConfigError(
      "config key warm_start.steps: the warm start imitates the field solution, which the examples"
      " of data.task do not have; set 0"
    )
  end_id = tokenizer.stop_ids[0]

  def encode() -> list[list[int]]:  # in `on_each`, so that all processes raise
    solutions = batch.columns["solution"]
    if not all(isinstance(solution, str) and solution for solution in solutions):
      raise ConfigStopsRun(
        "config key warm_start.steps: some examples have no text in the field solution, which the"
        " warm start imitates; set 0, in another --workdir"
      )
    return tokenizer.encode_batch_after(solutions)

  encoded = processes.on_each(encode)
  tokens = [[*ids, end_id] for ids in encoded]
  fitting = [ids if len(ids) <= max_tokens else [] for ids in tokens]  # [] has no loss
  completions_PT, lengths_P = processes.join_rows(
    (_pad(fitting, max_tokens, tokenizer.pad_id), np.array([*map(len, fitting)], np.int32))
  )
  if not lengths_P.any():
    raise ConfigStopsRun(
      f"config key sampling.max_tokens is {max_tokens}: all {len(lengths_P)} solutions of a batch"
      " of the warm start are longer, so it would learn nothing; raise it, in another --workdir"
    )
  mask_PT = (np.arange(max_tokens) < lengths_P[:, None]).astype(np.float32)
  dropped = int((lengths_P == 0).sum())
  return SupervisedBatch(batch, completions_PT, mask_PT, dropped)


@functools.lru_cache(2)  # a step may end one epoch and begin the next
def _permutation(seed: int, epoch: int, size: int) -> np.ndarray:
  """A random permutation of range(size), int64, read-only because it is cached."""
  # This sorts raw words of Philox, because numpy promises that they never change. It promises
  # nothing about Generator.permutation.
  philox = np.random.Philox(key=np.array([seed % 2**64, epoch], np.uint64))
  order = np.argsort(philox.random_raw(size), kind="stable")
  order.flags.writeable = False
  return order


def _permutation_at(seed: int, epoch: int, size: int, places: np.ndarray) -> np.ndarray:
  """The entries of a permutation of range(size) at `places`, without computing the others.

  A Feistel network permutes the numbers of 2 * `half` bits. A number that is not below `size` is
  permuted again until it is, which keeps the map one to one (cycle walking: Black and Rogaway,
  Ciphers with arbitrary finite domains, 2002).
  """
  key = np.array([seed % 2**64, epoch], np.uint64)
  words = np.random.Philox(key=key).random_raw(_ROUNDS)
  half = np.uint64(-(-(size - 1).bit_length() // 2))  # half the bits of the numbers, rounded up
  mask = (np.uint64(1) << half) - np.uint64(1)
  found = places.astype(np.uint64)
  outside = np.ones(len(found), bool)
  while outside.any():
    left, right = found[outside] >> half, found[outside] & mask
    for word in words:
      left, right = right, left ^ (_mixed(right ^ word) & mask)
    found[outside] = left << half | right
    outside = found >= np.uint64(size)
  return found.astype(np.int64)


def _mixed(words: np.ndarray) -> np.ndarray:
  """Hashes uint64 words with the last steps of splitmix64 (Steele et al. 2014)."""
  words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return words ^ (words >> np.uint64(31))


def _pad(rows: Sequence[Sequence[int] | np.ndarray], width: int, pad_id: int) -> np.ndarray:
  """Pads rows of token ids on the right, int32 [rows, width]."""
  padded = np.full((len(rows), width), pad_id, np.int32)
  for padded_row, ids in zip(padded, rows):
    padded_row[: len(ids)] = ids
  return padded
