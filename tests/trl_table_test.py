"""The page "Coming from TRL": keys exist, and defaults are those of both programs."""

import ast
import dataclasses
from pathlib import Path
import re

import pytest
from small_run import small_config

import grpo_jax
from grpo_jax import config as config_lib
from grpo_jax.around.trl import from_trl
from grpo_jax.around.trl_fields import FIELDS, LOSSES
from grpo_jax.config import Config
from grpo_jax.run import checks

SECTION = (Path(__file__).parents[1] / "docs/from_trl.md").read_text()
HEADER = "| TRL | default | here | default | notes |"
METRICS = "| TRL's metric | here | notes |"
SECTIONS = [
  field.name for field in dataclasses.fields(Config) if dataclasses.is_dataclass(field.type)
]


def code(text):
  """The words in backticks, without blocks of code."""
  return re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def rows():
  """(TRL's fields, their defaults, our keys, their defaults) of each row of the large tables."""
  for table in SECTION.split(HEADER)[1:]:
    for line in table.split("\n\n")[0].strip().splitlines()[1:]:
      cells = [cell.strip() for cell in line.strip("|").split("|")]
      assert len(cells) == 5, line
      yield tuple(code(cell) for cell in cells[:4])


def metric_rows():
  """(TRL's metrics, ours, notes) of each row of the table of metrics."""
  (table,) = SECTION.split(METRICS)[1:]
  for line in table.split("\n\n")[0].strip().splitlines()[1:]:
    trl, here, notes = (cell.strip() for cell in line.strip("|").split("|"))
    assert code(here) or here == "not here", line
    yield code(trl), code(here), notes


def value_of(config, key):
  for name in key.split("."):
    config = getattr(config, name)
  return config


def settings():
  """Every key=value of the page."""
  words = re.findall(r"--config\.([\w.]+=\S+)", SECTION)
  words += [word for word in code(SECTION) if "=" in word and word.split(".")[0] in SECTIONS]
  return sorted(set(words))


def nested(key, text):
  """The settings of a config with one key changed."""
  try:
    value = ast.literal_eval(text)
  except (ValueError, SyntaxError):
    value = text
  for name in reversed(key.split(".")):
    value = {name: value}
  return value


def test_every_default_of_ours_is_the_one_in_the_table():
  compared = 0
  for _, _, keys, defaults in rows():
    keys = [key for key in keys if not key.startswith("--")]
    assert len(keys) == len(defaults), keys
    for key, default in zip(keys, defaults):
      config_lib.check_key(key)
      assert ast.literal_eval(default) == value_of(Config(), key), key
      compared += 1
  assert compared > 50  # else the table is read wrongly


def test_from_trl_has_the_same_table():
  in_page = set()
  for names, defaults, keys, _ in rows():
    in_page |= set(names)
    for name in names:
      assert set(FIELDS[name].keys) <= set(keys), name
      assert bool(FIELDS[name].keys) == bool(keys), name
    for name, default in zip(names, defaults):
      assert ast.literal_eval(default) == FIELDS[name].default, name
  assert in_page == FIELDS.keys()


def test_from_trl_has_the_same_losses():
  lines = SECTION.split("| `loss_type` | here |")[1].split("\n\n")[0].strip().splitlines()[1:]
  found = {}
  for line in lines:
    names, here = line.strip("|").split("|")
    settings = [word.split("=") for word in code(here) if re.match(r"[\w.]+=[\w.]+$", word)]
    values = {key: value for key, value in settings if key != "algo.length_norm"}
    found |= dict.fromkeys(code(names), values)
  assert found == {
    name: {key: str(value) for key, value in changes.items()} for name, changes in LOSSES.items()
  }


def test_the_flags_of_the_page_are_those_of_from_trl():
  config = from_trl({"max_steps": 100}, say=None)
  of_page = re.findall(r"^--config.*$", SECTION.split("```")[1], flags=re.M)
  for flag in " ".join(of_page).split():
    key, _, text = flag.removeprefix("--config.").partition("=")
    assert str(value_of(config, key)) == text, flag


def test_every_key_in_the_text_exists():
  keys = [word for word in code(SECTION) if re.fullmatch(rf"({'|'.join(SECTIONS)})\.\w+", word)]
  assert len(keys) > 50
  for key in keys:
    config_lib.check_key(key)


@pytest.mark.parametrize("setting", settings())
def test_every_value_in_the_text_is_allowed(setting):
  key, _, text = setting.partition("=")
  config = config_lib.from_dict(nested(key, text))
  needed = {"algo.correction": {"correction_high": 3.0}, "algo.clip_low": {"surrogate": "cispo"}}
  algo = dataclasses.replace(config.algo, **needed.get(key, {}))
  checks.check_config(dataclasses.replace(config, algo=algo))


@pytest.mark.slow
def test_every_field_that_trl_defines_is_in_the_table_with_its_default():
  trl = pytest.importorskip("trl")
  fields = {field.name: field for field in dataclasses.fields(trl.GRPOConfig)}
  in_table = set()
  for names, defaults, _, _ in rows():
    in_table |= set(names)
    assert len(defaults) in (0, len(names)), names
    for name, default in zip(names, defaults):
      assert ast.literal_eval(default) == fields[name].default, name
  assert trl.GRPOConfig.__annotations__.keys() <= in_table
  assert in_table <= fields.keys()


def test_a_shared_name_means_the_same_or_the_table_says_what_differs():
  names = [name for trl, _, _ in metric_rows() for name in trl]
  assert len(names) == len(set(names)) > 30
  for trl, here, notes in metric_rows():
    assert len(here) in (0, len(trl)), trl
    assert trl != here or notes, trl


@pytest.mark.slow
def test_every_metric_of_the_table_is_in_a_run(tmp_path):
  config = small_config(entropy_target=0.5, correction="truncate", correction_high=3.0)
  grpo_jax.train(config, tmp_path)
  (row,) = grpo_jax.read_metrics(tmp_path)
  (name,) = (key.split("/")[1] for key in row if key.startswith("rewards/") and "/std" in key)
  needs_more = {"router/aux_loss", "tools/call_frequency", "tools/failure_frequency"}
  ours = {one.replace("NAME", name) for _, here, _ in metric_rows() for one in here}
  assert ours - row.keys() == needs_more


@pytest.mark.slow
def test_every_metric_that_trl_logs_is_in_the_table():
  trainer = pytest.importorskip("trl.trainer.grpo_trainer")
  source = Path(trainer.__file__).read_text()
  logged = re.findall(r'_metrics\[(?:mode|"train")\]\[f?"([^"]+)"\]', source)
  logged = {name.replace("{reward_func_name}", "NAME") for name in logged}
  of_the_trainer = {"loss", "grad_norm", "learning_rate", "epoch"}  # of transformers
  assert {name for trl, _, _ in metric_rows() for name in trl} == logged | of_the_trainer
