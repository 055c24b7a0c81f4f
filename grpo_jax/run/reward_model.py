"""Learned rewards: Hugging Face folders of models that score a text, or the steps of one, on the policy's mesh."""

import dataclasses
import functools
from pathlib import Path
from typing import Any, Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh

from grpo_jax import model
from grpo_jax.config import Reward
from grpo_jax.data import tokenizer
from grpo_jax.data.tokenizer import Tokenizer
from grpo_jax.model import hub
from grpo_jax.parallel import sharding
from grpo_jax.rewards import Steps
from grpo_jax.settings import ConfigError


@dataclasses.dataclass(frozen=True)
class Text:
  """What a reward model reads of a completion."""

  ids: list[int]
  marks: list[
    tuple[int, int]
  ]  # of each step: (its end in characters of the completion, the token whose score it gets)


class RewardModel:
  """A reward as grpo_jax/rewards has them, called after its folder. All processes call it together, with the same texts.

  *ForSequenceClassification scores a text by what its head gives at the last token, as TRL's GRPOTrainer does;
  *ForTokenClassification each step by the probability of label 1 at the last token of the separator after it, as TRL's
  PRMTrainer trains it. A text longer than the model's positions gets None. Raises ConfigError for a folder that is no
  reward model of these families, or whose tokenizer cannot be read.
  """

  def __init__(
    self,
    name: str,
    config: Reward,
    mesh: Mesh,
    put: Callable[[Any], Any],
    fetch: Callable[[Any], Any],
  ):
    """`name`: a folder, or a name of huggingface.co. `put` and `fetch` move host arrays onto the mesh, their first axis over
    data x fsdp x expert, and back."""
    folder = Path(hub.folder(name, "reward.functions")).expanduser()
    self.__name__ = Path(name).expanduser().resolve().name
    shape = model.load_config(folder, model.SCORERS)
    self._tokens = tokenizer.load(folder, "reward.functions")
    if self._tokens.vocab_size > shape.vocab_size:
      raise ConfigError(
        f"reward.functions: the tokenizer in {folder} has {self._tokens.vocab_size} ids, its model "
        f"{shape.vocab_size}: download or save it again"
      )
    self._model = dataclasses.replace(
      shape, dtype=config.dtype, **sharding.model_shardings(shape, mesh)
    )
    self._read = READERS[shape.labels]
    self._batch, self._separator, self._put, self._fetch = (
      config.batch,
      config.step_separator,
      put,
      fetch,
    )
    abstract = jax.eval_shape(functools.partial(model.init, config=self._model), jax.random.key(0))
    places = flatten_dict(sharding.param_specs(abstract, mesh), sep="/")
    # Frozen, so they are kept as they are computed with; norm scales are float32, as they are multiplied with.
    cast = lambda name, x: jax.lax.with_sharding_constraint(
      model.quantised(name, x, config.dtype), places[name]
    )
    self._params = model.load(folder, places, cast, model.SCORERS)[1]
    self._scores = jax.jit(self._forward, out_shardings=sharding.batch_sharding(mesh))

  def __call__(
    self, completions: Sequence[str], prompts: Sequence[str], **columns
  ) -> list[Steps | None]:
    """Of each completion its steps; a score of the whole text is one, at the end."""
    texts = self._read(self._tokens, self._separator, columns.get("messages", prompts), completions)
    out: list[Steps | None] = [None] * len(texts)
    fitting = [i for i, text in enumerate(texts) if len(text.ids) <= self._model.max_positions]
    fitting.sort(key=lambda i: len(texts[i].ids))  # so that those scored together are about as long
    for start in range(0, len(fitting), self._batch):
      chosen = fitting[start : start + self._batch]
      scores_BT = self._fetch(
        self._scores(self._params, self._put(self._padded([texts[i].ids for i in chosen])))
      )
      for i, scores_T in zip(chosen, scores_BT):
        out[i] = [(end, float(scores_T[t])) for end, t in texts[i].marks]
    return out

  def check_conversations(self) -> None:
    """Raises ConfigError where the model cannot read them."""
    try:
      self._tokens.render(
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}],
        generation_prompt=False,
      )
    except ConfigError as error:
      raise ConfigError(
        f"reward.functions: {self.__name__}: {str(error).removeprefix('data.tokenizer: ')}"
      ) from None

  def _padded(self, rows):
    """int32 [reward.batch, T]: T is a power of two, so that few lengths are ever compiled."""
    T = min(1 << (len(rows[-1]) - 1).bit_length(), self._model.max_positions)
    tokens_BT = np.zeros((self._batch, T), np.int32)
    for row, ids in zip(tokens_BT, rows):
      row[: len(ids)] = ids
    return tokens_BT

  def _forward(self, params, tokens_BT):
    config = dataclasses.replace(self._model, length=tokens_BT.shape[1])
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    with jax.default_matmul_precision(
      "float32" if config.dtype == "float32" else None
    ):  # whatever the policy's
      hidden_BTD, _ = model.features(params, config, tokens_BT, positions_BT)
      return model.score(params, config, hidden_BTD)


def whole_texts(
  tokens: Tokenizer, separator: str, prompts: Sequence[str], completions: Sequence[str]
) -> list[Text]:
  """Prompt and completion as one text, scored at its last token that is not the one for padding, as transformers does."""
  del separator
  ids = tokens.encode_batch([_text(tokens, *both) for both in zip(prompts, completions)])
  last = lambda row: max((t for t, token in enumerate(row) if token != tokens.pad_id), default=0)
  return [
    Text(row, [(max(1, len(completion)), last(row))]) for row, completion in zip(ids, completions)
  ]


def stepwise(
  tokens: Tokenizer, separator: str, prompts: Sequence[str], completions: Sequence[str]
) -> list[Text]:
  """Prompt, then each step and the separator, tokenised one by one as in training, after what begins a text.

  Steps are what the separator leaves of a completion, blank ones left out; a completion that has no other is one step.
  """
  encode = tokens.encode_batch
  steps = [_steps(completion, separator) for completion in completions]
  begin, end = encode([tokens.special.get("bos_token", ""), separator])
  openings = encode([_text(tokens, prompt) for prompt in prompts])
  bodies = iter(encode([step for of_one in steps for step, _ in of_one]))
  texts = []
  for opening, of_one in zip(openings, steps):
    ids, marks = opening if opening[:1] == begin else begin + opening, []
    for _, at in of_one:
      ids = ids + next(bodies) + end
      marks.append((at, len(ids) - 1))
    texts.append(Text(ids, marks))
  return texts


READERS = {1: whole_texts, 2: stepwise}  # of ModelConfig.labels


def _steps(completion, separator):
  """[(step, its end in characters of the completion, its separator included)]."""
  steps, end = [], 0
  for step in completion.split(separator):
    end = min(end + len(step) + len(separator), len(completion))
    if step.strip():
      steps.append((step, end))
  return steps or [(completion, max(1, len(completion)))]


def _text(tokens, prompt, completion=None):
  """As the model reads it: a prompt of messages through its own chat template, up to the answer or with it."""
  if isinstance(prompt, str):
    return prompt + (completion or "")
  answer = [] if completion is None else [{"role": "assistant", "content": completion}]
  return tokens.render([*prompt, *answer], generation_prompt=not answer)
