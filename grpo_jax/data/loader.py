"""Batches of prompts. The batch of a step depends only on the step and the seed.

A run that resumes therefore has no position in the data to restore.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_jax.data import chat
from grpo_jax.data.prompt_template import fill
from grpo_jax.data.tokenizer import Tokenizer
from grpo_jax.settings import ConfigError

if TYPE_CHECKING:
  from grpo_jax.config import Data


@dataclasses.dataclass(frozen=True)
class PromptBatch:
  """P prompts of at most S tokens.

  Attributes:
    prompts_PS: int32, right-padded.
    prompt_lengths_P: int32, the number of tokens before the padding.
    texts: The P prompts as texts. With data.chat: as the chat template rendered them.
    columns: What reward functions get (see grpo_jax/rewards), as lists of P entries.
  """

  prompts_PS: np.ndarray
  prompt_lengths_P: np.ndarray
  texts: tuple[str, ...]
  columns: dict[str, list[Any]]


@dataclasses.dataclass(frozen=True)
class SupervisedBatch:
  """P prompts with the solutions to imitate, of at most T tokens with the token that ends them.

  Attributes:
    prompts: The prompts.
    completions_PT: int32, the solutions, right-padded.
    mask_PT: float32, 1 on the tokens of the solution. A row of zeros for a solution that is too
      long.
    dropped: How many solutions are too long.
  """

  prompts: PromptBatch
  completions_PT: np.ndarray
  mask_PT: np.ndarray
  dropped: int


class Prompts:
  """The examples of a split with their prompts, formatted and tokenized once.

  Examples whose prompt has more than data.max_prompt_tokens tokens are left out.

  Without data.chat, a prompt is the text of data.prompt with its fields filled in, after the
  tokenizer's prefix. With data.chat, it is a conversation, rendered up to where the assistant's
  answer begins. data.prompt then gives the user's message, or names the one field that holds the
  messages.

  Attributes:
    examples: The examples that are kept.
    texts: Their prompts as texts.
    tokens: Their prompts as token ids, int32 arrays.
    messages: Their conversations, or None without data.chat.
    dropped: How many examples are left out.
    max_tokens: The longest prompt that is kept (S).
    pad_id: The id of the padding token.
  """

  def __init__(
    self, split: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, data: "Data"
  ) -> None:
    """Formats and tokenizes the prompts.

    Raises:
      ConfigError: data.prompt does not fit the examples, or no prompt is short enough.
    """
    examples = list(split)
    messages: list[chat.Messages] | None = None
    if data.chat:
      messages = [_conversation(data, example) for example in examples]
      texts = tokenizer.render_batch(messages)
      prefix_ids: tuple[int, ...] = ()  # a chat template writes <s> or the like itself
    else:
      texts = [fill(data.prompt, example) for example in examples]
      prefix_ids = tokenizer.prefix_ids
    text_tokens = tokenizer.encode_batch(texts)
    if not all(text_tokens):
      raise ConfigError(
        f"data.prompt={data.prompt!r} makes a prompt without tokens; it must hold some text"
      )
    tokens = [[*prefix_ids, *ids] for ids in text_tokens]
    kept = [i for i, ids in enumerate(tokens) if len(ids) <= data.max_prompt_tokens]
    if not kept:
      shortest = min(map(len, tokens), default=0)
      raise ConfigError(
        f"data.max_prompt_tokens={data.max_prompt_tokens} drops all {len(examples)} prompts;"
        f" the shortest one has {shortest} tokens"
      )
    self.examples = tuple(examples[i] for i in kept)
    self.texts = tuple(texts[i] for i in kept)
    self.tokens = [np.array(tokens[i], np.int32) for i in kept]
    self.messages = tuple(messages[i] for i in kept) if messages else None
    self.dropped = len(examples) - len(kept)
    self.max_tokens = data.max_prompt_tokens
    self.pad_id = tokenizer.pad_id

  def __len__(self) -> int:
    return len(self.examples)


def step_indices(seed: int, step: int, count: int, size: int) -> np.ndarray:
  """The examples that a step uses.

  Every epoch visits the examples in a new random order. Step s takes the next `count` of them:
  place i of step s is position p = s * count + i of the run, and this is member p % size of the
  permutation of epoch p // size. So every epoch has every example exactly once, even if it ends in
  the middle of a step.

  Args:
    seed: The seed of the permutations.
    step: The step.
    count: How many examples a step uses.
    size: How many examples there are.

  Returns:
    Their indices, int64 [count].
  """
  positions = step * count + np.arange(count)
  epochs = positions // size
  indices = np.empty(count, np.int64)
  for epoch in np.unique(epochs):
    in_epoch = epochs == epoch
    order = _permutation(seed, int(epoch), size)
    indices[in_epoch] = order[positions[in_epoch] % size]
  return indices


def prompt_batch(prompts: Prompts, indices: np.ndarray) -> PromptBatch:
  """The prompts at `indices`, an integer array [P]."""
  tokens = [prompts.tokens[i] for i in indices]
  examples = [prompts.examples[i] for i in indices]
  texts = tuple(prompts.texts[i] for i in indices)
  columns: dict[str, list[Any]] = {"prompts": list(texts)}
  for field in prompts.examples[0]:
    columns[field] = [example[field] for example in examples]
  if prompts.messages:
    columns["messages"] = [prompts.messages[i] for i in indices]
  prompts_PS = _pad(tokens, prompts.max_tokens, prompts.pad_id)
  lengths_P = np.array([len(ids) for ids in tokens], np.int32)
  return PromptBatch(prompts_PS, lengths_P, texts, columns)


def supervised_batch(
  prompts: Prompts, indices: np.ndarray, tokenizer: Tokenizer, max_tokens: int
) -> SupervisedBatch:
  """The prompts at `indices` with their solutions, for the warm start.

  The first stop id ends every solution. A solution that is too long is left out of the loss as a
  whole, because a solution without its end would teach the model not to stop.

  Args:
    prompts: The prompts of a split whose examples have a `solution`.
    indices: Integer array [P].
    tokenizer: Encodes the solutions.
    max_tokens: The longest solution, with the token that ends it (T).

  Raises:
    ConfigError: The tokenizer has no stop id.
  """
  if not tokenizer.stop_ids:
    raise ConfigError(
      "data.tokenizer names no end-of-sequence token, which the warm start must teach; add"
      " eos_token to its tokenizer_config.json"
    )
  batch = prompt_batch(prompts, indices)
  end_id = tokenizer.stop_ids[0]
  tokens = [[*ids, end_id] for ids in tokenizer.encode_batch_after(batch.columns["solution"])]
  fitting = [ids if len(ids) <= max_tokens else [] for ids in tokens]
  completions_PT = _pad(fitting, max_tokens, tokenizer.pad_id)
  lengths_P = np.array([len(ids) for ids in fitting])
  mask_PT = (np.arange(max_tokens) < lengths_P[:, None]).astype(np.float32)
  dropped = int((lengths_P == 0).sum())
  return SupervisedBatch(batch, completions_PT, mask_PT, dropped)


def _permutation(seed: int, epoch: int, size: int) -> np.ndarray:
  # Sorting raw words of Philox instead of Generator.permutation, because numpy promises that the
  # words never change, but promises nothing about the methods of Generator.
  philox = np.random.Philox(key=np.array([seed % 2**64, epoch], np.uint64))
  return np.argsort(philox.random_raw(size), kind="stable")


def _pad(rows: Sequence[Sequence[int] | np.ndarray], width: int, pad_id: int) -> np.ndarray:
  padded = np.full((len(rows), width), pad_id, np.int32)
  for padded_row, ids in zip(padded, rows):
    padded_row[: len(ids)] = ids
  return padded


def _conversation(data: "Data", example: Mapping[str, Any]) -> chat.Messages:
  """The conversation that the model is to continue.

  It begins with a system message of data.system, unless it has a system message of its own.
  """
  field = data.prompt[1:-1]
  prompt_is_one_field = data.prompt == f"{{{field}}}"
  if prompt_is_one_field and isinstance(example.get(field), list):
    messages = example[field]
  else:
    messages = [{"role": "user", "content": fill(data.prompt, example)}]
  chat.check(messages, f"data.prompt={data.prompt!r}")
  if data.system and messages[0]["role"] != "system":
    return [{"role": "system", "content": data.system}, *messages]
  return messages
