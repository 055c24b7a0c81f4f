"""Batches as pure functions of the step: nothing to rewind when a run resumes."""
import dataclasses
from typing import Any, Mapping, Sequence

import numpy as np

from grpo_jax.config import ConfigError
from grpo_jax.data.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class PromptBatch:
  """P prompts of at most S tokens."""
  prompts_PS: np.ndarray  # int32, right-padded
  prompt_lengths_P: np.ndarray  # int32, tokens before the padding
  texts: tuple[str, ...]  # the prompts
  columns: dict[str, list[Any]]  # what rewards are given: the prompts and each field of the examples, lists of P


@dataclasses.dataclass(frozen=True)
class SupervisedBatch:
  """Prompts and the solutions to imitate, of at most T tokens including the one that ends them."""
  prompts: PromptBatch
  completions_PT: np.ndarray  # int32, right-padded
  mask_PT: np.ndarray  # float32, 1 on the solution's tokens; a row of zeros where it did not fit
  dropped: int  # solutions that did not fit


class Prompts:
  """The examples of a split whose prompts have at most `max_tokens` tokens, formatted and tokenised once.

  Attributes: `examples` (those kept), `texts` (their prompts), `dropped` (how many are too long), `max_tokens` (S).
  """

  def __init__(self, split: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, template: str, max_tokens: int):
    examples = list(split)
    texts = [_format(template, example) for example in examples]
    tokens = tokenizer.encode_batch(texts)
    if not all(tokens):
      raise ConfigError(f"data.prompt={template!r} makes a prompt without tokens; it must hold some text")
    keep = [i for i, ids in enumerate(tokens) if len(ids) <= max_tokens]
    if not keep:
      shortest = min(map(len, tokens), default=0)
      raise ConfigError(f"data.max_prompt_tokens={max_tokens} drops all {len(examples)} prompts;"
                        f" the shortest one has {shortest} tokens")
    self.examples = tuple(examples[i] for i in keep)
    self.texts = tuple(texts[i] for i in keep)
    self.dropped = len(examples) - len(keep)
    self.max_tokens = max_tokens
    self._tokens = [np.array(tokens[i], np.int32) for i in keep]
    self._pad_id = tokenizer.pad_id

  def __len__(self) -> int:
    return len(self.examples)


def indices(seed: int, step: int, count: int, size: int) -> np.ndarray:
  """Which of `size` examples the step's `count` places get, int64 [count].

  Place i of step s is position p = s * count + i: member p % size of a permutation that is new in each epoch p // size.
  So every epoch has every example exactly once, wherever the steps cut it.
  """
  positions = step * count + np.arange(count)
  epochs = positions // size
  out = np.empty(count, np.int64)
  for epoch in np.unique(epochs):
    here = epochs == epoch
    out[here] = _permutation(seed, int(epoch), size)[positions[here] % size]
  return out


def prompt_batch(prompts: Prompts, indices: np.ndarray) -> PromptBatch:
  """The prompts at `indices` [P]."""
  tokens = [prompts._tokens[i] for i in indices]
  examples = [prompts.examples[i] for i in indices]
  texts = tuple(prompts.texts[i] for i in indices)
  columns = {"prompts": list(texts)} | {key: [e[key] for e in examples] for key in prompts.examples[0]}
  lengths_P = np.array([len(ids) for ids in tokens], np.int32)
  return PromptBatch(_pad(tokens, prompts.max_tokens, prompts._pad_id), lengths_P, texts, columns)


def supervised_batch(prompts: Prompts, indices: np.ndarray, tokenizer: Tokenizer, max_tokens: int) -> SupervisedBatch:
  """The prompts at `indices` with their solutions, each ended by the first stop id.

  A solution longer than `max_tokens` (T) is left out of the loss whole: cut off, it would teach not to stop.
  """
  if not tokenizer.stop_ids:
    raise ConfigError("data.tokenizer names no end-of-sequence token, which the warm start must teach; add eos_token to"
                      " its tokenizer_config.json")
  batch = prompt_batch(prompts, indices)
  tokens = [ids + [tokenizer.stop_ids[0]] for ids in tokenizer.encode_batch(batch.columns["solution"])]
  fitting = [ids if len(ids) <= max_tokens else [] for ids in tokens]
  lengths_P = np.array([len(ids) for ids in fitting])
  mask_PT = (np.arange(max_tokens) < lengths_P[:, None]).astype(np.float32)
  dropped = int((lengths_P == 0).sum())
  return SupervisedBatch(batch, _pad(fitting, max_tokens, tokenizer.pad_id), mask_PT, dropped)


def _permutation(seed, epoch, size):
  # Sorting raw Philox words, not Generator.permutation: numpy promises the words for ever, the method's stream not.
  philox = np.random.Philox(key=np.array([seed % 2**64, epoch], np.uint64))
  return np.argsort(philox.random_raw(size), kind="stable")


def _pad(rows, width, pad_id):
  out = np.full((len(rows), width), pad_id, np.int32)
  for row, ids in zip(out, rows):
    row[:len(ids)] = ids
  return out


def _format(template, example):
  try:
    return template.format(**example)
  except (KeyError, IndexError, ValueError, AttributeError) as error:
    raise ConfigError(f"data.prompt={template!r} cannot be filled ({type(error).__name__}: {error}); its fields are"
                      f" {', '.join('{%s}' % key for key in example)}, and a plain brace is written twice") from None
