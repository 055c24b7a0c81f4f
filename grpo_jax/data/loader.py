"""Batches as pure functions of the step: nothing to rewind when a run resumes."""

import dataclasses
import string
from typing import Any, Mapping, Sequence

import numpy as np

from grpo_jax.config import Data
from grpo_jax.data import chat
from grpo_jax.data.tokenizer import Tokenizer
from grpo_jax.settings import ConfigError


@dataclasses.dataclass(frozen=True)
class PromptBatch:
  """P prompts of at most S tokens."""

  prompts_PS: np.ndarray  # int32, right-padded
  prompt_lengths_P: np.ndarray  # int32, tokens before the padding
  texts: tuple[str, ...]  # the prompts, those of conversations as their template rendered them
  columns: dict[str, list[Any]]  # what rewards are given (grpo_jax/rewards), lists of P


@dataclasses.dataclass(frozen=True)
class SupervisedBatch:
  """Prompts and the solutions to imitate, of at most T tokens including the one that ends them."""

  prompts: PromptBatch
  completions_PT: np.ndarray  # int32, right-padded
  mask_PT: np.ndarray  # float32, 1 on the solution's tokens; a row of zeros where it did not fit
  dropped: int  # solutions that did not fit


class Prompts:
  """The examples of a split whose prompts have at most data.max_prompt_tokens tokens, formatted and tokenised once.

  A prompt is data.prompt, filled in and begun as the tokenizer says a text begins; or with data.chat a conversation,
  rendered up to where the answer begins. Of that, data.prompt is the user's message, or the one field with its messages.

  Attributes: `examples` (those kept), `texts` and `tokens` (their prompts; int32 arrays), `messages` (their
  conversations; None without data.chat), `dropped` (how many are too long), `max_tokens` (S).
  """

  def __init__(self, split: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, data: Data):
    examples = list(split)
    messages = [_conversation(data, example) for example in examples] if data.chat else None
    texts = (
      [tokenizer.render(one) for one in messages]
      if data.chat
      else [_format(data.prompt, e) for e in examples]
    )
    tokens = tokenizer.encode_batch(texts)
    if not all(tokens):
      raise ConfigError(
        f"data.prompt={data.prompt!r} makes a prompt without tokens; it must hold some text"
      )
    if not data.chat:  # a chat template writes <s> or the like itself
      tokens = [[*tokenizer.prefix_ids, *ids] for ids in tokens]
    keep = [i for i, ids in enumerate(tokens) if len(ids) <= data.max_prompt_tokens]
    if not keep:
      shortest = min(map(len, tokens), default=0)
      raise ConfigError(
        f"data.max_prompt_tokens={data.max_prompt_tokens} drops all {len(examples)} prompts;"
        f" the shortest one has {shortest} tokens"
      )
    self.examples = tuple(examples[i] for i in keep)
    self.texts = tuple(texts[i] for i in keep)
    self.tokens = [np.array(tokens[i], np.int32) for i in keep]
    self.messages = messages and tuple(messages[i] for i in keep)
    self.dropped = len(examples) - len(keep)
    self.max_tokens = data.max_prompt_tokens
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
  tokens = [prompts.tokens[i] for i in indices]
  examples = [prompts.examples[i] for i in indices]
  texts = tuple(prompts.texts[i] for i in indices)
  columns = {"prompts": list(texts)} | {
    key: [e[key] for e in examples] for key in prompts.examples[0]
  }
  if prompts.messages:
    columns["messages"] = [prompts.messages[i] for i in indices]
  lengths_P = np.array([len(ids) for ids in tokens], np.int32)
  return PromptBatch(_pad(tokens, prompts.max_tokens, prompts._pad_id), lengths_P, texts, columns)


def supervised_batch(
  prompts: Prompts, indices: np.ndarray, tokenizer: Tokenizer, max_tokens: int
) -> SupervisedBatch:
  """The prompts at `indices` with their solutions, each ended by the first stop id.

  A solution longer than `max_tokens` (T) is left out of the loss whole: cut off, it would teach not to stop.
  """
  if not tokenizer.stop_ids:
    raise ConfigError(
      "data.tokenizer names no end-of-sequence token, which the warm start must teach; add eos_token to"
      " its tokenizer_config.json"
    )
  batch = prompt_batch(prompts, indices)
  tokens = [
    ids + [tokenizer.stop_ids[0]] for ids in tokenizer.encode_batch_after(batch.columns["solution"])
  ]
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
    row[: len(ids)] = ids
  return out


def _conversation(data: Data, example: Mapping[str, Any]) -> chat.Messages:
  """The messages that a model is to answer, data.system the first of them where there is no other."""
  messages = example.get(data.prompt[1:-1])
  if data.prompt != f"{{{data.prompt[1:-1]}}}" or not isinstance(
    messages, list
  ):  # not one field alone, with messages
    messages = [{"role": "user", "content": _format(data.prompt, example)}]
  chat.check(messages, f"data.prompt={data.prompt!r}")
  with_system = data.system and messages[0]["role"] != "system"
  return [{"role": "system", "content": data.system}, *messages] if with_system else messages


def _format(template, example):
  try:
    lists = [
      name
      for _, name, _, _ in string.Formatter().parse(template)
      if isinstance(example.get(name), list)
    ]
    text = template.format(**example)
  except (KeyError, IndexError, ValueError, AttributeError) as error:
    raise ConfigError(
      f"data.prompt={template!r} cannot be filled ({type(error).__name__}: {error}); its fields are"
      f" {', '.join('{%s}' % key for key in example)}, and a plain brace is written twice"
    ) from None
  if lists:
    raise ConfigError(
      f"data.prompt={template!r}: {lists[0]} is a list of messages, which only a chat template makes a text"
      f" of; set data.chat=True and data.prompt='{{{lists[0]}}}'"
    )
  return text
