"""The settings of the variants are typed: mypy finds a wrong one, and each axis has all its own."""

import dataclasses
from pathlib import Path
import re
import subprocess
import sys

import pytest

from grpo_jax.algo.advantages import ADVANTAGES, AdvantageSettings
from grpo_jax.algo.aggregation import AGGREGATIONS, AggregationSettings
from grpo_jax.algo.corrections import CORRECTIONS, CorrectionSettings
from grpo_jax.algo.settings import Algo
from grpo_jax.algo.surrogates import SURROGATES, SurrogateSettings
from grpo_jax.algo.token_selection import TOKEN_WEIGHTS, SelectionSettings
from grpo_jax.algo.variant import Record, check_settings
from grpo_jax.settings import Settings, at_least, names_of, setting

ROOT = Path(__file__).parents[1]
AXES = {
  AdvantageSettings: ADVANTAGES,
  SurrogateSettings: SURROGATES,
  AggregationSettings: AGGREGATIONS,
  CorrectionSettings: CORRECTIONS,
  SelectionSettings: TOKEN_WEIGHTS,
}
RECORDS = [
  pytest.param(axis, record, id=f"{axis.__name__}-{name}")
  for axis, records in AXES.items()
  for name, record in records.items()
]

# A line with a wrong setting ends in what mypy says of it.
PROGRAM = """
import dataclasses

import jax

from grpo_jax.algo.variant import Records
from grpo_jax.algo.settings import Algo
from grpo_jax.algo.surrogates import SURROGATES, register_surrogate
from grpo_jax.algo.surrogates.terms import Terms
from grpo_jax.algo.surrogates.clipped import PpoSettings
from grpo_jax.algo.surrogates.surrogate import Surrogate
from grpo_jax.settings import Settings, at_least, setting


@dataclasses.dataclass(frozen=True)
class MineSettings(Settings):
  slope: float = setting(0.5, "mine: a slope", at_least(0))


def right(terms: Terms, algo: MineSettings) -> jax.Array:
  return algo.slope * terms.ratio_PGT


def misspelt(terms: Terms, algo: PpoSettings) -> jax.Array:
  return algo.clip_hi * terms.ratio_PGT  # "PpoSettings" has no attribute "clip_hi"


def of_another(terms: Terms, algo: PpoSettings) -> jax.Array:
  return algo.k_pos * terms.ratio_PGT  # "PpoSettings" has no attribute "k_pos"


def of_nothing(terms: Terms, algo: Settings) -> jax.Array:
  return algo.clip_low * terms.ratio_PGT  # "Settings" has no attribute "clip_low"


TABLE = Records[Surrogate]()
TABLE["right"] = Surrogate(loss=right, settings=MineSettings, examples=())
TABLE["inherits"] = Surrogate(loss=of_nothing, settings=PpoSettings, examples=())
TABLE["lacks"] = Surrogate(loss=right, settings=PpoSettings, examples=())  # "loss" to "Surrogate"


@register_surrogate
def registered(terms: Terms, algo: Algo) -> jax.Array:
  algo.missing  # "Algo" has no attribute "missing"
  return algo.clip_high * SURROGATES["ppo_clip"].loss(terms, algo)


Algo(clip_hi=0.2)  # Unexpected keyword argument "clip_hi"
Algo(clip_low="a")  # Argument "clip_low" to "Algo" has incompatible type "str"
"""


@pytest.mark.slow
def test_mypy_finds_every_wrong_setting_and_no_other(tmp_path):
  file = tmp_path / "program.py"
  file.write_text(PROGRAM)
  command = ("-m", "mypy", f"--cache-dir={tmp_path / 'cache'}", "--no-error-summary")
  done = subprocess.run(
    [sys.executable, *command, "grpo_jax", str(file)], cwd=ROOT, capture_output=True, text=True
  )
  found = dict(re.findall(r"program\.py:(\d+): error: (.*)", done.stdout))
  expected = {
    str(number): line.partition("  # ")[2]
    for number, line in enumerate(PROGRAM.splitlines(), 1)
    if "  # " in line
  }
  assert found.keys() == expected.keys(), done.stdout + done.stderr
  for number, message in expected.items():
    assert message in found[number]


@pytest.mark.parametrize("axis, record", RECORDS)
def test_an_axis_has_the_settings_of_its_records_and_examples_change_no_others(axis, record):
  assert issubclass(axis, record.settings) and issubclass(Algo, axis)
  for example in record.examples:
    assert example.settings.keys() <= set(names_of(record.settings))


@dataclasses.dataclass(frozen=True)
class Mine(Settings):
  slope: float = setting(0.5, "a slope", at_least(0))


def test_who_forgets_to_add_settings_to_the_axis_is_told_where():
  records = {"mine": Record(settings=Mine, examples=())}
  message = "mine reads typed_settings_test.Mine: put it in front of the bases of SurrogateSettings"
  with pytest.raises(TypeError, match=re.escape(message)):
    check_settings(SurrogateSettings, records)

  @dataclasses.dataclass(frozen=True)
  class Collected(Mine, SurrogateSettings):
    """As the message says."""

  check_settings(Collected, records)


def test_one_name_cannot_have_two_meanings():
  @dataclasses.dataclass(frozen=True)
  class Other(Settings):
    slope: float = setting(0.5, "another slope", at_least(0))

  @dataclasses.dataclass(frozen=True)
  class Both(Other, Mine):
    """The slope of the first one would be that of both."""

  with pytest.raises(TypeError, match="the setting slope of Both is declared by 2 classes"):
    check_settings(Both, {})
