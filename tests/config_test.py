"""The config: its settings, how plain values become one, and that a whole run reads every key."""

import dataclasses
import importlib
import json
from pathlib import Path
import re
import sys
from typing import get_type_hints

from absl import flags
import jax
import jax.numpy as jnp
from ml_collections import config_flags
import pytest

from configs import arithmetic, default
from grpo_jax import config as config_lib
from grpo_jax import model, plain_values, settings
from grpo_jax.algo import checks as algo_checks
from grpo_jax.algo import settings as algo_settings
from grpo_jax.algo import token_selection
from grpo_jax.algo.advantages import ADVANTAGES
from grpo_jax.algo.aggregation import AGGREGATIONS
from grpo_jax.algo.corrections import CORRECTIONS, LEVELS
from grpo_jax.algo.kl import KL
from grpo_jax.algo.objective import objective, totals
from grpo_jax.algo.presets import PRESETS, preset
from grpo_jax.algo.ratios import RATIOS
from grpo_jax.algo.rejections import REJECTIONS, without_rejected
from grpo_jax.algo.settings import Algo
from grpo_jax.algo.surrogates import SURROGATES
from grpo_jax.algo.token_selection.select import select
from grpo_jax.config import Config, check_key, completed, from_dict, to_dict
from grpo_jax.data.prompts import PromptSet
from grpo_jax.data.tasks import tasks
from grpo_jax.data.tokenizers import tokenizer
from grpo_jax.evaluation.evaluator import Evaluator
from grpo_jax.recipes import load_config
from grpo_jax.run import checks, device_checks
from grpo_jax.run.run import Run
from grpo_jax.scoring.scorers import Scorers
from grpo_jax.settings import ConfigError, Missing, Setting, Settings, at_least, names_of, setting
from grpo_jax.storage.checkpoint import Checkpoints
from grpo_jax.storage.reading import as_begun, read_config, read_metrics
from grpo_jax.storage.saved_config import check_same_run
from grpo_jax.train import train
from grpo_jax.training.loop import run_steps
from grpo_jax.types import Batch, Coefficients, Rewards, TokenStats

ROOT = Path(__file__).parents[1]
KINDS = get_type_hints(Config)
SECTIONS = [Config, *(kind for kind in KINDS.values() if dataclasses.is_dataclass(kind))]


def flat(values):
  """Nested values by dotted key."""
  out = {}
  for name, value in values.items():
    inner = flat(value) if isinstance(value, dict) else None
    out |= {name: value} if inner is None else {f"{name}.{key}": x for key, x in inner.items()}
  return out


def changed(**changes):
  """configs/default.py as plain values, with changes by key. __ stands for the dot."""
  values = default.get_config().to_dict()
  for key, value in changes.items():
    section, _, last = key.rpartition("__")
    (values[section] if section else values)[last] = value
  return values


def without(values, *keys):
  """Nested values without these keys."""
  values = json.loads(json.dumps(values))
  for key in keys:
    section, _, last = key.rpartition(".")
    del (values[section] if section else values)[last]
  return values


# The settings.


def fits(value, kind):
  if hasattr(kind, "__args__"):  # tuple[int, ...]
    return type(value) is tuple and all(type(item) is kind.__args__[0] for item in value)
  return type(value) is kind


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_setting_is_complete(section):
  """A type, a default of that type and in its range, and a meaning."""
  kinds = get_type_hints(section)
  assert section.__doc__ and kinds.keys() == {field.name for field in dataclasses.fields(section)}
  for field in dataclasses.fields(section):
    if dataclasses.is_dataclass(kinds[field.name]):
      assert field.default == kinds[field.name]()
      continue
    declared = field.metadata["setting"]
    assert type(declared) is Setting and declared.default == field.default
    values = [declared.default] if declared.before is None else [declared.default, declared.before]
    for value in values:
      assert fits(value, kinds[field.name]), (field.name, value)
      assert declared.range.contains(value), (field.name, value)
    assert declared.meaning.strip() == declared.meaning != "", field.name
    assert declared.range.requirement, field.name


# Any number is right: a seed and bounds of a covariance. The mesh is checked against the devices.
NUMBERS_WITHOUT_A_RANGE = {
  "seed",
  "cov_low",
  "cov_high",
  "data",
  "fsdp",
  "expert",
  "tensor",
  "context",
}


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_number_has_a_range(section):
  for field in dataclasses.fields(section):
    if type(field.default) in (int, float) and field.name not in NUMBERS_WITHOUT_A_RANGE:
      assert field.metadata["setting"].range is not settings.ANY, field.name


def test_every_value_is_of_a_type_that_errors_can_name():
  for key, kind in flat(plain_values.keys(Config)).items():
    if not dataclasses.is_dataclass(kind):
      assert str(config_lib.wrong_type(key, object)).startswith(f"config key {key} must be ")


@pytest.mark.parametrize("name", PRESETS)
def test_the_default_config_holds_the_defaults_and_the_preset(name):
  values = default.get_config(name).to_dict()
  assert values == dataclasses.asdict(Config(algo=preset(name)))
  assert from_dict(values) == Config(algo=preset(name))
  defaults = flat(dataclasses.asdict(Config()))
  assert flat(values).keys() == defaults.keys()
  differing = {key: value for key, value in flat(values).items() if value != defaults[key]}
  of_preset = {f"algo.{key}": value for key, value in PRESETS[name].items()}
  assert differing == {key: x for key, x in of_preset.items() if x != defaults[key]}
  types = {key: type(value) for key, value in flat(values).items()}
  assert types == {key: type(value) for key, value in defaults.items()}


def test_the_command_line_can_change_every_key(monkeypatch):
  """ml_collections takes no override of a list, so the lists of a config must be tuples there."""
  values = flat(default.get_config().to_dict())
  values["reward.functions"], values["sampling.stop_ids"] = ("strict", "format"), (3, 5)
  flag_values = flags.FlagValues()
  config_flags.DEFINE_config_file("config", flag_values=flag_values)
  overrides = [f"--config.{key}={value}" for key, value in values.items()]
  argv = ["program", f"--config={ROOT}/configs/default.py", *overrides]
  monkeypatch.setattr(sys, "argv", argv)  # ml_collections reads the overrides there
  flag_values(argv)
  assert flat(flag_values.config.to_dict()) == values


# Plain values.


def test_round_trip_through_json():
  config = from_dict(changed(sampling__stop_ids=[3, 5]))
  assert config.sampling.stop_ids == (3, 5)
  assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


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
      "config key model.path has no value yet: set it with --config.model.path=...",
    ),
    ("mesh", 8, "config key mesh must be a section of keys, got 8"),
    ("clip_high", 0.3, "config key clip_high is unknown: did you mean algo.clip_high?"),
    ("algo__clip_hihg", 0.3, "config key algo.clip_hihg is unknown: did you mean algo.clip_high?"),
    (
      "mesh__sequence",
      1,
      "config key mesh.sequence is unknown: mesh has data, fsdp, expert, tensor, context, sampler",
    ),
  ],
)
def test_a_wrong_value_is_named(key, value, message):
  with pytest.raises(ConfigError) as error:
    from_dict(changed(**{key: value}))
  assert str(error.value) == message


def test_a_missing_key_gets_its_default():
  assert from_dict({}) == Config()
  values = without(changed(eval__every=7, seed=3), "eval.batch", "sampling", "steps")
  config = from_dict(values)
  assert (config.seed, config.eval.every) == (3, 7)
  assert config == from_dict(changed(eval__every=7, seed=3))
  assert from_dict({"eval": {"every": 7}}).eval == config_lib.Eval(every=7)
  assert from_dict({"algo": {"kl": "k1"}}).algo == Algo(kl="k1")


@dataclasses.dataclass(frozen=True)
class Part:
  """A section with newer settings."""

  old: int = setting(1, "as old as the section")
  newer: float = setting(0.5, "0 is what runs did before", at_least(0), before=0.0)
  flag: bool = setting(True, "False is what runs did before", before=False)
  names: tuple[str, ...] = setting(("a",), "the default is what runs did before")


@dataclasses.dataclass(frozen=True)
class Whole:
  """A config."""

  seed: int = setting(0, "as old as the config")
  part: Part = Part()


def test_a_missing_key_of_a_saved_config_gets_the_value_of_that_time(monkeypatch):
  monkeypatch.setattr(config_lib, "Config", Whole)
  assert from_dict({}) == Whole(seed=0, part=Part(old=1, newer=0.5, flag=True, names=("a",)))
  before = Part(old=1, newer=0.0, flag=False, names=("a",))
  assert from_dict({}, saved=True) == Whole(part=before)
  saved = {"seed": 4, "part": {"old": 2, "flag": True}}
  expected = Whole(seed=4, part=Part(old=2, newer=0.0, flag=True, names=("a",)))
  assert from_dict(saved, saved=True) == expected
  assert from_dict(saved) == dataclasses.replace(expected, part=Part(old=2, flag=True))
  # A whole config of now is as it is, saved or not.
  assert from_dict(to_dict(Whole()), saved=True) == Whole()

  assert completed(saved) == to_dict(expected)
  assert completed({}) == to_dict(Whole(part=before))
  assert completed(to_dict(Whole())) == to_dict(Whole())
  # What only the earlier config has is kept, so that a run of another program is noticed.
  foreign = {"part": {"gone": 1}, "width": 3, "more": {"key": []}}
  assert completed(foreign) == to_dict(Whole(part=before)) | {
    "part": to_dict(before) | {"gone": 1},
    "width": 3,
    "more": {"key": []},
  }
  assert saved == {"seed": 4, "part": {"old": 2, "flag": True}}  # the arguments are not changed


def test_a_saved_config_has_no_unknown_keys_and_no_wrong_types():
  with pytest.raises(ConfigError, match=r"^config key algo\.clip is unknown: did you mean algo\."):
    from_dict({"algo": {"clip": 0.2}}, saved=True)
  with pytest.raises(ConfigError, match=r"^config key seed must be a whole number, got 'a'$"):
    from_dict({"seed": "a"}, saved=True)


@pytest.mark.parametrize(
  "key, message",
  [
    ("agol.clip_high", "did you mean algo.clip_high?"),  # the section is wrong
    ("agol.clip_hihg", "did you mean algo.clip_high?"),  # both are wrong
    ("every", "did you mean eval.every or checkpoint.every or log.every?"),  # it is missing
    ("xyz.abc", "they are all in grpo_jax/config.py"),
    (
      "mesh",
      "set one of mesh.data, mesh.fsdp, mesh.expert, mesh.tensor, mesh.context, mesh.sampler",
    ),
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
    if values[section]["path"] is None or isinstance(values[section]["path"], Missing):
      # The user has to give it.
      values[section]["path"] = "given"
  checks.check_config(from_dict(values))
  assert name == "default" or f"--config=configs/{name}.py" in module.__doc__


# The config of an earlier run.

NEWER = (
  "optimizer.name",
  "sampling.temperature_schedule",
  "sampling.temperature_end",
  "learner.router_aux_coef",
  "algo.overlong",
  "eval.temperature",
  "lora",
)


def tiny():
  """configs/arithmetic.py with the smallest model."""
  c = arithmetic.get_config()
  c.model.update(embed_dim=8, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=4, mlp_dim=8)
  c.batch.update(prompts=8, group_size=2)
  c.eval.update(every=0, examples=8, batch=8)
  c.optimizer.update(schedule="constant", warmup_steps=0)
  c.steps, c.warm_start.steps, c.sampling.max_tokens = 1, 0, 4
  return c


@pytest.fixture
def older_folder(tmp_path):
  """What a run of one step leaves that reads its config, without the keys of `NEWER`."""
  values = to_dict(from_dict(tiny().to_dict()))
  (tmp_path / "config.json").write_text(json.dumps(without(values, *NEWER)))
  (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
  return tmp_path


@pytest.fixture(scope="module")
def older_run(tmp_path_factory):
  """A run of one step whose config.json lacks the keys of `NEWER`."""
  folder = tmp_path_factory.mktemp("older") / "run"
  train(from_dict(tiny().to_dict()), folder)
  path = folder / "config.json"
  path.write_text(json.dumps(without(json.loads(path.read_text()), *NEWER)))
  return folder


@pytest.mark.parametrize(
  "key, value, message",
  [
    ("optimizer__name", "lion", "optimizer.name = 'adamw', this run 'lion'"),
    (
      "sampling__temperature_schedule",
      "linear",
      "sampling.temperature_schedule = 'constant', this run 'linear'",
    ),
    ("algo__kl_coef", 0.2, "algo.kl_coef = 0.04, this run 0.2"),  # the older config has this key
  ],
)
def test_an_older_run_does_not_continue_with_another_value(older_folder, key, value, message):
  values, path = tiny().to_dict(), older_folder / "config.json"
  section, _, last = key.partition("__")
  values[section][last] = value
  before = path.read_bytes()
  with pytest.raises(ConfigError) as error:
    train(from_dict(values), older_folder)
  advice = "name another --workdir, or keep the old value"
  assert str(error.value) == f"{path} has {message}: {advice}"
  assert path.read_bytes() == before and [row["step"] for row in read_metrics(older_folder)] == [1]


def test_the_command_of_an_older_run_goes_on_with_it(older_folder, tmp_path_factory):
  """A setting whose default is not what runs did before gets what they did, and only there."""
  config = from_dict(tiny().to_dict())
  tmp_path = tmp_path_factory.mktemp("earlier")
  assert as_begun(config, older_folder) == config and as_begun(config, tmp_path / "new") == config
  saved = without(json.loads((older_folder / "config.json").read_text()), "data.count_at_start")
  (tmp_path / "config.json").write_text(json.dumps(saved))
  goes_on = as_begun(config, tmp_path)
  assert goes_on == config.replace({"data.count_at_start": settings.LARGEST_INT})
  check_same_run(tmp_path, completed(saved), to_dict(goes_on))
  chosen = config.replace({"data.count_at_start": 7})
  assert as_begun(chosen, tmp_path) == chosen


@pytest.mark.parametrize("key", config_lib.REMOVED)
def test_a_key_of_earlier_versions_says_what_replaces_it(key, tmp_path):
  line = f"config key {key} is gone: {config_lib.REMOVED[key].instead}"
  section, _, name = key.partition(".")
  for give in (
    lambda: check_key(key),
    lambda: Config().replace({key: 1}),
    lambda: from_dict({section: {name: 1}}),
  ):
    with pytest.raises(ConfigError) as error:
      give()
    assert str(error.value) == line
  recipe = tmp_path / "mine.py"
  recipe.write_text(
    "from grpo_jax.configs import default\n\ndef get_config():\n"
    f"  c = default.get_config()\n  c.{key} = 1\n  return c\n"
  )
  with pytest.raises(ConfigError, match=f"^{re.escape(line)}$"):
    load_config(recipe)


def test_a_run_with_a_key_of_earlier_versions_goes_on_where_nothing_changes(tmp_path):
  """A key that changed no number may have had any value. Others need the value of today."""
  new = to_dict(Config())
  old = {
    **new,
    "log": new["log"] | {"wandb": "sums"},
    "learner": new["learner"] | {"max_skipped_updates": 3},
    "reward": new["reward"] | {"dtype": ""},
    "warm_start": new["warm_start"] | {"warmup_steps": 10},
    "sampling": new["sampling"] | {"parts": 2, "layout": "rows"},
  }
  assert from_dict(old, saved=True) == Config()
  check_same_run(tmp_path / "config.json", completed(old), new)
  without_warm_start = old | {"warm_start": new["warm_start"] | {"warmup_steps": 5, "steps": 0}}
  check_same_run(tmp_path / "config.json", completed(without_warm_start), new)
  warm = old | {"warm_start": new["warm_start"] | {"warmup_steps": 10, "steps": 7}}
  own_dtype = old | {"reward": new["reward"] | {"dtype": new["model"]["dtype"]}}
  check_same_run(tmp_path / "config.json", completed(own_dtype), new)
  for key, value in (
    ("warm_start.warmup_steps", 5),
    ("reward.dtype", "bfloat16"),
    ("learner.max_skipped_updates", 0),
    ("data.max_image_pixels", 80_000_000),
  ):
    section, _, name = key.partition(".")
    other = warm | {section: warm[section] | {name: value}}
    same = from_dict(other, saved=True)  # it can still be evaluated
    with pytest.raises(ConfigError) as error:
      check_same_run(tmp_path / "config.json", completed(other), to_dict(same))
    assert str(error.value) == (
      f"{tmp_path}/config.json has {key} = {value!r}, this run no such key:"
      f" {config_lib.REMOVED[key].instead}; name another --workdir"
    )


def test_a_run_from_before_b2_followed_the_optimizer_keeps_its_number(tmp_path):
  saved = to_dict(Config().replace({"optimizer.b2": 0.999, "optimizer.name": "lion"}))
  (tmp_path / "config.json").write_text(json.dumps(saved))
  config = Config().replace({"optimizer.name": "lion"})
  assert as_begun(config, tmp_path) == config.replace({"optimizer.b2": 0.999})
  chosen = config.replace({"optimizer.b2": 0.5})
  assert as_begun(chosen, tmp_path) == chosen
  (tmp_path / "config.json").write_text(json.dumps(to_dict(config)))
  assert as_begun(config, tmp_path) == config
  # Other keys that a run wrote are those of the run: a command without them is another one.
  other = to_dict(Config().replace({"model.vision": "ignored"}))
  (tmp_path / "config.json").write_text(json.dumps(other))
  assert as_begun(Config(), tmp_path) == Config()


@pytest.mark.slow
def test_an_older_run_evaluates_and_resumes(older_run):
  config = from_dict(tiny().to_dict())
  assert read_config(older_run) == config
  run = Run(read_config(older_run))
  checkpoints = Checkpoints(older_run / "checkpoints", keep=3)
  step, params = checkpoints.restore_params(run.parameters.abstract)
  metrics = Evaluator(run, Scorers(run))(run.parameters.for_sampling(params), step)
  assert step == 1 and 0 <= metrics["eval/accuracy"] <= 1

  decaying = config.replace({"steps": 2, "optimizer.schedule": "linear"})
  with pytest.raises(
    ConfigError, match="steps = 1, this run 2: with optimizer.schedule = 'linear'"
  ):
    train(decaying, older_run)
  state = run_steps(dataclasses.replace(config, steps=2), older_run).state
  assert int(state.train.step) == 2
  assert [row["step"] for row in read_metrics(older_run)] == [1, 2]
  # From now on, the file has every key.
  completed_values = json.loads((older_run / "config.json").read_text())
  assert completed_values == json.loads(json.dumps(to_dict(dataclasses.replace(config, steps=2))))


# Every key is read.

REWARD_MODEL = ROOT / "tests" / "golden" / "rewards" / "qwen2_steps"
REGISTRIES = {
  "advantage": ADVANTAGES,
  "ratio": RATIOS,
  "surrogate": SURROGATES,
  "aggregation": AGGREGATIONS,
  "kl": KL,
  "correction": CORRECTIONS,
  "correction_level": LEVELS,
}
# No use of a value: a check, a copy, a comparison, or a place in error messages.
NO_USE = {
  dataclasses.__file__,
  config_lib.__file__,
  settings.__file__,
  checks.__file__,
  device_checks.__file__,
  algo_checks.__file__,
  "<string>",  # the methods that dataclasses writes
}


@pytest.fixture
def reads(monkeypatch):
  """The set of the (section, setting) that code has read since the test began."""
  reads = set()

  def recorded(self, name):
    frame = sys._getframe(1)
    # Properties such as Algo.uses_reference read settings for somebody else.
    while frame.f_code.co_filename == algo_settings.__file__:
      frame = frame.f_back
    if frame.f_code.co_filename not in NO_USE:
      reads.add((type(self), name))
    return object.__getattribute__(self, name)

  for section in SECTIONS:
    monkeypatch.setattr(section, "__getattribute__", recorded, raising=False)
  return reads


def variants():
  """(name, record, changes of Algo() that make an update use the record), of every registry."""
  for key, registry in REGISTRIES.items():
    for name, record in registry.items():
      yield f"{key}={name}", record, of_examples(record) | {key: name}
  for name, record in (token_selection.TOKEN_WEIGHTS | REJECTIONS).items():
    yield name, record, of_examples(record)


def of_examples(record):
  """Settings under which the record does something: those of its worked examples together."""
  return {name: x for example in record.examples for name, x in example.settings.items()}


def trace_step(algo):
  """Traces advantages, token selection and loss of a batch. Nothing is computed."""

  def step(x):
    rewards = Rewards(
      scores_PGJ=x[..., :1],
      weights=(1.0,),
      greedy_scores_PJ=x[:, 0, :1],
      step_rewards_PGT=x,
      step_ends_PGT=x,
    )
    advantages = ADVANTAGES[algo.advantage].compute(rewards, x, algo)
    advantages = advantages if advantages.ndim == 3 else advantages[..., None]
    without_rejected(x, x, x, algo)
    selection = select(x, x, x, x, x, algo)
    batch = Batch(
      mask_PGT=x,
      advantages_PGT=x * advantages,
      behavior_logprobs_PGT=x,
      old_logprobs_PGT=x,
      ref_logprobs_PGT=x,
      selection=selection,
    )
    stats = TokenStats(logprobs_PGT=x, entropies_PGT=x, full_kl_PGT=x)
    coefs = Coefficients(kl=jnp.float32(0.1), entropy=jnp.float32(0.1))
    return objective(stats, batch, totals(batch, coefs, algo), algo)[0]

  jax.eval_shape(step, jax.ShapeDtypeStruct((4, 3, 5), jnp.float32))


@pytest.mark.parametrize(
  "record, changes", [pytest.param(*rest, id=name) for name, *rest in variants()]
)
def test_a_record_reads_the_settings_that_it_brings(record, changes, reads):
  algo = Algo(**{"kl_coef": 0.1, "off_policy_threshold": 0.1} | changes)
  trace_step(algo)
  unread = set(names_of(getattr(record, "settings", Settings))) - {name for _, name in reads}
  assert not unread


def with_adapters(config, folder):
  """The config with adapters on a checkpoint, which it writes into `folder`."""
  characters = tokenizer.characters(tasks.ALPHABET)
  shape = model.ModelConfig(
    vocab_size=characters.vocab_size,
    embed_dim=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_dim=4,
    mlp_dim=8,
    max_positions=64,
  )
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


@pytest.mark.slow
def test_a_whole_run_reads_every_key(tmp_path, reads):
  """Warm start, GRPO with a reference, a reward model, evaluation, adapters, conversations.

  The records of the registries are traced one by one.
  """
  c = tiny()
  c.batch.update(prompts=16, group_size=3)
  c.sampling.temperature_schedule = "linear"
  c.reward.update(functions=(str(REWARD_MODEL),), step_separator=";")
  c.algo.update(
    minibatches=2,
    old_logprobs="recomputed",
    kl_coef=0.1,
    kl_target=0.1,
    ref_sync_steps=1,
    entropy_target=0.1,
    dynamic_sampling=True,
    max_resample_rounds=1,
    overlong=0.5,
  )
  c.eval.update(every=1, samples=2)
  c.warm_start.update(steps=2, batch=8)
  c.sampling.max_tokens = 16  # so that some solutions fit
  config = from_dict(c.to_dict())
  jax.config.update("jax_disable_most_optimizations", True)  # the numbers do not matter
  try:
    train(config, tmp_path / "run")
    Run(with_adapters(config, tmp_path / "hf"))
    with_chat_template = tokenizer.load(ROOT / "tests/golden/tokenizers/qwen")
    conversations = dataclasses.replace(config.data, chat=True, max_prompt_tokens=99)
    PromptSet([{"question": "1+1="}], with_chat_template, conversations)
    for _, _, changes in variants():
      trace_step(dataclasses.replace(config.algo, **changes))
  finally:
    jax.config.update("jax_disable_most_optimizations", False)
  unread = [
    f"{section.__name__}.{field.name}"
    for section in SECTIONS
    for field in dataclasses.fields(section)
    if (section, field.name) not in reads
  ]
  assert not unread
