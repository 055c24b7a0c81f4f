"""The page "Coming from TRL": keys exist, and defaults are those of both programs."""

import ast
import dataclasses
from pathlib import Path
import re

import pytest

from grpo_jax import config as config_lib
from grpo_jax.config import Config
from grpo_jax.programs import checks

SECTION = (Path(__file__).parents[1] / "docs/from_trl.md").read_text()
HEADER = "| TRL | default | here | default | notes |"
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
