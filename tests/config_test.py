"""The config: its keys, how plain values become structs, and that a whole run reads every key."""

import dataclasses
import functools
import importlib
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from configs import arithmetic, default
from grpo_jax import config as config_lib
from grpo_jax import model
from grpo_jax.algo import selection
from grpo_jax.algo.objective import objective, whole
from grpo_jax.algo.presets import PRESETS
from grpo_jax.algo.surrogates import SURROGATES
from grpo_jax.config import Config, check_key, from_dict, keys, to_dict
from grpo_jax.data import tasks, tokenizer
from grpo_jax.data.loader import Prompts
from grpo_jax.run.build import Run
from grpo_jax.run.checks import check
from grpo_jax.settings import ConfigError
from grpo_jax.train import train
from grpo_jax.types import Batch, Coefs, Scores, TokenStats

ROOT = Path(__file__).parents[1]
SECTIONS = [Config, *(hint for hint in keys().values() if dataclasses.is_dataclass(hint))]


def changed(**changes):
  """configs/default.py as plain values; changes by key, with __ for the dot."""
  values = default.get_config().to_dict()
  for key, value in changes.items():
    section, _, last = key.rpartition("__")
    (values[section] if section else values)[last] = value
  return values


def test_round_trip_through_json():
  config = from_dict(changed(sampling__stop_ids=[3, 5]))
  assert config.sampling.stop_ids == (3, 5)
  assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_defaults_hold_every_key_and_no_other():
  flat = {
    name if type(value) is not dict else f"{name}.{key}"
    for name, value in default.get_config().to_dict().items()
    for key in (value if type(value) is dict else "-")
  }
  assert flat == {key for key, hint in keys().items() if not dataclasses.is_dataclass(hint)}


def test_an_int_stands_for_a_float_and_nothing_else_is_converted():
  config = from_dict(changed(sampling__temperature=1, reward__weights=[2]))
  assert type(config.sampling.temperature) is float and type(config.reward.weights[0]) is float


@pytest.mark.parametrize(
  "key, value, message",
  [
    ("steps", 2.0, "config key steps must be a whole number, got 2.0"),
    ("steps", "2", "config key steps must be a whole number, got '2'"),
    ("steps", True, "config key steps must be a whole number, got True"),
    ("algo__kl_coef", "0.1", "config key algo.kl_coef must be a number, got '0.1'"),
    ("log__tensorboard", 1, "config key log.tensorboard must be True or False, got 1"),
    ("data__task", ["a"], "config key data.task must be a string, got ['a']"),
    (
      "reward__functions",
      "strict",
      "config key reward.functions must be a list of strings, got 'strict'",
    ),
    ("reward__weights", ["a"], "config key reward.weights must be a list of numbers, got ['a']"),
    (
      "sampling__stop_ids",
      [1.5],
      "config key sampling.stop_ids must be a list of whole numbers, got [1.5]",
    ),
    (
      "model__path",
      None,
      "config key model.path has no value yet: give it one with --config.model.path=...",
    ),
    ("mesh", 8, "config key mesh must be a section of keys, got 8"),
    ("clip_high", 0.3, "config key clip_high is unknown: did you mean algo.clip_high?"),
    ("algo__clip_hihg", 0.3, "config key algo.clip_hihg is unknown: did you mean algo.clip_high?"),
    (
      "mesh__sequence",
      1,
      "config key mesh.sequence is unknown: mesh has data, fsdp, expert, tensor",
    ),
  ],
)
def test_a_wrong_value_is_named(key, value, message):
  with pytest.raises(ConfigError) as error:
    from_dict(changed(**{key: value}))
  assert str(error.value) == message


def test_a_missing_key_is_named():
  values = changed()
  del values["eval"]["every"]
  with pytest.raises(
    ConfigError, match=r"^config key eval\.every is missing: start from configs/default\.py$"
  ):
    from_dict(values)


@pytest.mark.parametrize(
  "key, message",
  [
    ("agol.clip_high", "did you mean algo.clip_high?"),  # the section is wrong
    ("agol.clip_hihg", "did you mean algo.clip_high?"),  # so are both
    ("every", "did you mean eval.every or checkpoint.every or log.every?"),  # it is left out
    ("xyz.abc", "they are all in configs/default.py"),
    ("mesh", "set one of mesh.data, mesh.fsdp, mesh.expert, mesh.tensor"),
  ],
)
def test_the_key_that_was_meant(key, message):
  with pytest.raises(ConfigError, match="^config key " + key) as error:
    check_key(key)
  assert str(error.value).endswith(message)
  check_key("seed")
  check_key("algo.clip_high")


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
  "name", sorted(p.stem for p in (ROOT / "configs").glob("*.py") if p.stem != "__init__")
)
def test_every_config_loads(name, preset):
  module = importlib.import_module(f"configs.{name}")
  values = module.get_config(preset).to_dict()
  for section in ("model", "data"):
    if values[section]["path"] is None:  # to be given
      values[section]["path"] = "given"
  check(from_dict(values))
  assert name == "default" or f"--config=configs/{name}.py" in module.__doc__


def with_adapters(config, folder):
  """On a checkpoint, which it writes there."""
  characters = tokenizer.characters(tasks.ALPHABET)
  shape = model.ModelConfig(characters.vocab_size, 8, 1, 2, 2, 4, 8, max_positions=64)
  model.save(folder, shape, model.init(jax.random.key(0), shape))
  characters.save(folder)
  replace = dataclasses.replace
  return replace(
    config,
    model=replace(config.model, path=str(folder)),
    lora=replace(config.lora, rank=2),
    algo=replace(config.algo, ref_mixup=1.0),
    warm_start=replace(config.warm_start, steps=0),
  )


VARIANTS = [
  dict(
    advantage="gdpo",
    aggregation="constant",
    correction="truncate",
    correction_high=2.0,
    dynamic_sampling=False,
    old_logprobs="recomputed",
  ),
  dict(advantage="pass_at_k", overlong=0.0, off_policy_threshold=0.1, entropy_coef=0.1),
]
REWARDS = ROOT / "tests" / "golden" / "rewards"


def trace(run):
  """The functions of a step, without computing them."""
  shape = lambda *s, dtype=jnp.float32: jax.ShapeDtypeStruct(s, dtype)
  values, integers = shape(16, 3, 4), functools.partial(shape, dtype=jnp.int32)
  batch = Batch(
    integers(16, 12),
    integers(16),
    integers(16, 3, 4),
    values,
    values,
    values,
    values,
    values,
    values,
  )
  run.with_advantages.eval_shape(batch, Scores(shape(16, 3, 1)), shape())
  run.update.eval_shape(run.abstract_state, run.parameters.abstract, batch)


def trace_loss(algo):
  """That of a step whose model is not of interest."""

  def loss(x):
    selected = selection.select(x, x, x, x, x, algo)
    batch = Batch(None, None, None, x, x, x, x, x, x, selection=selected)
    return objective(
      TokenStats(x, x), batch, whole(batch, Coefs(algo.kl_coef, algo.entropy_coef), algo), algo
    )

  jax.eval_shape(loss, jax.ShapeDtypeStruct((16, 3, 4), jnp.float32))


def test_a_whole_run_reads_every_key(tmp_path, monkeypatch):
  """Warm start, GRPO with a reference, evaluation. A check of a value, a copy or a comparison is no use of it."""
  c = arithmetic.get_config()
  c.model.update(embed_dim=8, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=4, mlp_dim=8)
  c.batch.update(prompts=16, group_size=3)
  c.algo.update(
    minibatches=2,
    pass_k=2,
    kl_target=0.1,
    ref_sync_steps=1,
    entropy_target=0.1,
    dynamic_sampling=True,
    max_resample_rounds=1,
    overlong=0.5,
  )
  c.eval.update(every=1, examples=8, batch=8, samples=2)
  c.steps, c.warm_start.steps = 1, 2
  c.warm_start.batch, c.sampling.max_tokens, c.algo.kl_coef = 8, 4, 0.1
  config, read = from_dict(c.to_dict()), set()
  no_use = {
    dataclasses.__file__,
    config_lib.__file__,
    sys.modules[check.__module__].__file__,
    "<string>",
  }

  def recorded(self, name):
    if sys._getframe(1).f_code.co_filename not in no_use:
      read.add((type(self), name))
    return object.__getattribute__(self, name)

  for section in SECTIONS:
    monkeypatch.setattr(section, "__getattribute__", recorded, raising=False)
  jax.config.update("jax_disable_most_optimizations", True)  # what it computes does not matter
  try:
    train(config, str(tmp_path / "run"))
    Run(with_adapters(config, tmp_path / "hf"))
    chatty = tokenizer.load(ROOT / "tests/golden/tokenizers/qwen")
    Prompts(
      [{"question": "1+1="}],
      chatty,
      dataclasses.replace(config.data, chat=True, max_prompt_tokens=99),
    )
    reward = dataclasses.replace(
      config.reward, functions=(str(REWARDS / "qwen2_steps"),), step_separator=";"
    )
    Run(dataclasses.replace(config, reward=reward)).functions[0](completions=["1"], prompts=["1="])
    for change in VARIANTS:
      trace(Run(dataclasses.replace(config, algo=dataclasses.replace(config.algo, **change))))
    for surrogate in SURROGATES:
      trace_loss(dataclasses.replace(config.algo, surrogate=surrogate, top_entropy_quantile=0.5))
  finally:
    jax.config.update("jax_disable_most_optimizations", False)
  unread = [
    f"{section.__name__}.{field.name}"
    for section in SECTIONS
    for field in dataclasses.fields(section)
    if (section, field.name) not in read
  ]
  assert not unread
