"""Learned rewards: models in Hugging Face folders that score a text or its steps.

The models are sharded over the policy's mesh, and all processes compute together.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import model
from grpo_jax.config import Reward
from grpo_jax.data.tokenizers import tokenizer
from grpo_jax.data.tokenizers.tokenizer import Tokenizer
from grpo_jax.model.huggingface import hub
from grpo_jax.parallel import sharding
from grpo_jax.parallel.hosts import Hosts
from grpo_jax.rewards import Steps
from grpo_jax.run.parameters import load_frozen
from grpo_jax.settings import ConfigError

# A text, or the messages of a conversation.
Prompt = str | Sequence[Mapping[str, str]]


@dataclasses.dataclass(frozen=True)
class Text:
  """The tokens that a reward model reads for one completion.

  Attributes:
    ids: The token ids of the prompt and the completion.
    marks: For each step, its end in characters of the completion, and the position in `ids` of the
      token whose score is the step's score.
  """

  ids: list[int]
  marks: list[tuple[int, int]]


class RewardModel:
  """A reward function (see grpo_jax/rewards) that computes a model, and is named after its folder.

  All processes call it together, each with its own texts.

  A *ForSequenceClassification model scores a text by the output of its head at the last token, as
  TRL's GRPOTrainer does. A *ForTokenClassification model scores each step by the probability of
  label 1 at the last token of the separator after the step, as TRL's PRMTrainer trains it. A text
  that is longer than the model's positions is not scored.
  """

  # Marks of grpo_jax/rewards/marks.py: it uses the devices of the run, so no worker can call it.
  in_process = True
  needs_every_row = True

  def __init__(self, name: str, config: Reward, dtype: str, hosts: Hosts) -> None:
    """Loads the model onto the mesh.

    Args:
      name: A folder, or a name on huggingface.co.
      config: The section `reward` of the config.
      dtype: The dtype of weights and computation.
      hosts: The processes of the run and their mesh.

    Raises:
      ConfigError: The folder is no reward model of a known family, or its tokenizer cannot be read.
    """
    folder = Path(hub.folder(name, "reward.functions")).expanduser()
    self.__name__ = Path(name).expanduser().resolve().name
    shape = model.load_model_config(folder, model.REWARD_HEADS)
    tokens = tokenizer.load(folder, "reward.functions")
    self._tokens = tokens.for_model(shape.vocab_size, str(folder), "reward.functions")
    shardings: dict[str, Any] = sharding.model_shardings(shape, hosts.mesh, splits_tokens=True)
    self._model = dataclasses.replace(shape, dtype=dtype, **shardings)
    self._make_texts = TEXTS_BY_LABELS[shape.labels]
    self._batch = config.batch
    self._separator = config.step_separator
    self._hosts = hosts
    self._params = load_frozen(folder, self._model, hosts.mesh, model.REWARD_HEADS)
    self._scores = jax.jit(self._forward, out_shardings=sharding.batch_sharding(hosts.mesh))

  def __call__(
    self, completions: Sequence[str], prompts: Sequence[str], **columns: Sequence[Any]
  ) -> list[Steps | None]:
    """Returns the steps (end in characters, score) of each completion, or None if it is too long.

    A model that scores whole texts returns one step that ends where the completion ends. With a
    column `messages`, the model reads these conversations instead of `prompts`.
    """
    conversations = columns.get("messages", prompts)
    texts = self._hosts.on_each(
      lambda: self._make_texts(self._tokens, self._separator, conversations, completions)
    )
    # The N texts of all processes are scored together on the whole mesh. Then each process keeps
    # only the scores of its own texts.
    here = self._hosts.index
    lengths = np.array([len(text.ids) for text in texts], np.int32)
    processes = np.full(len(texts), here, np.int32)
    lengths_N, process_N = self._hosts.join_rows((lengths, processes))
    tokens_NT = self._hosts.join_rows(_padded(texts, lengths_N.max(initial=0)))
    number_N = np.cumsum(process_N == here) - 1  # the index in `texts`, for this process's rows
    scored_steps: list[Steps | None] = [None] * len(texts)
    fitting = np.flatnonzero(lengths_N <= self._model.max_positions)
    # Sorted by length, so that batches need little padding.
    fitting = fitting[np.argsort(lengths_N[fitting], kind="stable")]
    for start in range(0, len(fitting), self._batch):
      chosen = fitting[start : start + self._batch]  # its last row is the longest
      tokens = self._hosts.put(self._batch_of(tokens_NT[chosen], lengths_N[chosen[-1]]))
      scores = self._hosts.fetch(self._scores(self._params, tokens))
      for i, score_T in zip(chosen, scores):
        if process_N[i] == here:
          marks = texts[number_N[i]].marks
          scored_steps[number_N[i]] = [(end, float(score_T[position])) for end, position in marks]
    return scored_steps

  def check_conversations(self) -> None:
    """Raises ConfigError if the model's tokenizer cannot render conversations."""
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    try:
      self._tokens.render(messages, generation_prompt=False)
    except ConfigError as error:
      reason = str(error).removeprefix("data.tokenizer: ")
      raise ConfigError(f"reward.functions: {self.__name__}: {reason}") from None

  def _batch_of(self, rows: np.ndarray, longest: int) -> np.ndarray:
    """Pads rows, of which the longest has `longest` tokens, to int32 [reward.batch, T].

    T is a power of two or the model's limit, so that few shapes are compiled.
    """
    T = min(1 << (int(longest) - 1).bit_length(), self._model.max_positions)
    tokens_BT = np.zeros((self._batch, T), np.int32)
    width = min(T, rows.shape[1])
    tokens_BT[: len(rows), :width] = rows[:, :width]
    return tokens_BT

  def _forward(self, params: Any, tokens_BT: jax.Array) -> jax.Array:
    """Returns the score at each token, float32 [B, T]."""
    T = tokens_BT.shape[1]
    # Ring attention gives each device of the axis `context` two pieces of a text.
    padding = -T % (2 * self._model.context) if self._model.context > 1 else 0
    tokens_BT = jnp.pad(tokens_BT, ((0, 0), (0, padding))) if padding else tokens_BT
    # Some models choose their rotary angles by the length, which excludes the padding for shards.
    config = dataclasses.replace(self._model, length=T)
    positions_BT = jnp.broadcast_to(jnp.arange(T + padding).clip(max=T - 1), tokens_BT.shape)
    # Set here, because the process-wide default is the policy's precision.
    precision = "float32" if config.dtype == "float32" else None
    with jax.default_matmul_precision(precision):
      hidden_BTD, _ = model.features(params, config, tokens_BT, positions_BT)
      return model.score(params, config, hidden_BTD)[:, :T]


def whole_texts(
  tokens: Tokenizer, separator: str, prompts: Sequence[Prompt], completions: Sequence[str]
) -> list[Text]:
  """Tokenises prompt and completion as one text with one score.

  The score is read at the last token that is not the padding token, as in transformers. It belongs
  to a step that ends with the completion, at 1 for an empty one, because a step is never empty.
  """
  del separator  # only `stepwise`, which has the same arguments, splits completions
  pairs = zip(prompts, completions)
  rows = tokens.encode_batch([_text(tokens, prompt, answer) for prompt, answer in pairs])
  return [
    Text(ids, [(max(1, len(completion)), _last_position(ids, tokens.pad_id))])
    for ids, completion in zip(rows, completions)
  ]


def stepwise(
  tokens: Tokenizer, separator: str, prompts: Sequence[Prompt], completions: Sequence[str]
) -> list[Text]:
  """Tokenises the beginning-of-text token, the prompt, and each step followed by a separator.

  Each of these is tokenised separately, as in TRL's training. Completions are split into steps at
  the separator. Blank steps are skipped. A completion with only blank steps is one step.
  """
  steps = [_split_steps(completion, separator) for completion in completions]
  bos_ids, separator_ids = tokens.encode_batch([tokens.special.get("bos_token", ""), separator])
  openings = tokens.encode_batch([_text(tokens, prompt) for prompt in prompts])
  all_steps = [step for steps_of_completion in steps for step, _ in steps_of_completion]
  encoded_steps = iter(tokens.encode_batch(all_steps))
  texts = []
  for opening, steps_of_completion in zip(openings, steps):
    # A chat template may have written the beginning-of-text token already.
    ids = opening if opening[:1] == bos_ids else bos_ids + opening
    marks = []
    for _, end in steps_of_completion:
      ids = ids + next(encoded_steps) + separator_ids
      marks.append((end, len(ids) - 1))
    texts.append(Text(ids, marks))
  return texts


def _padded(texts: Sequence[Text], width: int) -> np.ndarray:
  """Pads the token ids of N texts to int32 [N, width]."""
  tokens_NT = np.zeros((len(texts), width), np.int32)
  for tokens_T, text in zip(tokens_NT, texts):
    tokens_T[: len(text.ids)] = text.ids
  return tokens_NT


# By ModelConfig.labels: models with one label score a text, with two labels (wrong, right) steps.
TEXTS_BY_LABELS = {1: whole_texts, 2: stepwise}


def _last_position(ids: Sequence[int], pad_id: int) -> int:
  """Returns the position of the last token that is not the padding token, or 0."""
  return max((position for position, token in enumerate(ids) if token != pad_id), default=0)


def _split_steps(completion: str, separator: str) -> list[tuple[str, int]]:
  """Returns each step and where it ends in characters, including its separator."""
  steps = []
  end = 0
  for step in completion.split(separator):
    end = min(end + len(step) + len(separator), len(completion))
    if step.strip():
      steps.append((step, end))
  return steps or [(completion, max(1, len(completion)))]


def _text(tokens: Tokenizer, prompt: Prompt, completion: str | None = None) -> str:
  """Returns the text for the model: the prompt, and the completion if there is one.

  The reward model's own chat template renders conversations.
  """
  if isinstance(prompt, str):
    return prompt + (completion or "")
  if completion is None:
    return tokens.render(prompt, generation_prompt=True)
  answer = {"role": "assistant", "content": completion}
  return tokens.render([*prompt, answer], generation_prompt=False)
