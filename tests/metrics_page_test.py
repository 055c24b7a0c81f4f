"""docs/metrics.md has every metric of the code, and the code every metric of the page."""

import dataclasses
from pathlib import Path
import re

import pytest
from small_run import small_config, with_section

from grpo_jax.storage.reading import read_metrics
from grpo_jax.training.loop import run_steps

ROOT = Path(__file__).parents[1]
# Names in a row that are not metrics.
NO_METRICS = {"step", "time"}
WRITTEN_BY = ("algo", "asynchronous", "batches", "evaluation", "learner", "scoring", "training")
KINDS = (
  "advantage batch check clip_ratio completions correction curriculum dynamic_sampling"
  " environment eval frac_reward_zero_std harness perf prompts ratio rejection reward rewards"
  " rollout router sampler sampling selection staleness teacher time tools update warm_start"
).split()


def on_the_page():
  """The metrics of the tables."""
  lines = (ROOT / "docs" / "metrics.md").read_text().splitlines()
  cells = [line.split(" | ")[0] for line in lines if line.startswith("| `")]
  return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def pattern(name):
  """A metric of the page as an expression: NAME, TASK and K stand for any text or number."""
  text = re.escape(name).replace("NAME", r"[\w@.]+").replace("TASK", r"\w+")
  text = text.replace("EXAM", r"\w+").replace("METRIC", r"[\w@/]+")
  return re.sub(r"@K\b", r"@\\d+", text)


def is_known(name):
  return any(re.fullmatch(pattern(one), name) for one in on_the_page())


def in_the_code():
  """Names that the code writes as texts. Braces, which are filled in, stand for anything."""
  name = rf'"((?:{"|".join(KINDS)})/[\w@{{}}/]+)"'
  for folder in WRITTEN_BY:
    for file in (ROOT / "grpo_jax" / folder).rglob("*.py"):
      for found in re.findall(name, file.read_text()):
        yield re.sub(r"{[^}]*}", "*", found)


def test_the_page_has_every_metric_that_the_code_names():
  names = {name for name in in_the_code() if "*" not in name}
  assert len(names) > 50
  assert not {name for name in names if not is_known(name)}


def test_the_code_has_every_metric_of_the_page():
  written = [re.escape(name).replace(r"\*", ".*") for name in in_the_code()]
  words = set(
    re.findall(
      r'"(\w+)"',
      "".join(
        file.read_text()
        for folder in WRITTEN_BY
        for file in (ROOT / "grpo_jax" / folder).rglob("*.py")
      ),
    )
  )
  assert not {
    name
    for name in on_the_page()
    if name not in words and not any(re.fullmatch(one, name) for one in written)
  }


FILTERED = {
  "algo": {
    "dynamic_sampling": True,
    "correction": "truncate",
    "correction_high": 2.0,
    "reject_k3": 1.0,
  }
}
AHEAD = {"rollout": {"max_staleness": 1}, "curriculum": {"rest": 2}}


@pytest.mark.parametrize(
  "changes", [pytest.param(one, marks=pytest.mark.slow) for one in ({}, FILTERED, AHEAD)]
)
def test_every_metric_of_a_run_is_on_the_page(changes, tmp_path):
  config = dataclasses.replace(small_config(kl_coef=0.1), steps=2)
  config = with_section(config, "eval", every=1, samples=2, examples=4, batch=4)
  config = with_section(config, "warm_start", steps=1, batch=4)
  config = with_section(config, "sampling", max_tokens=32)
  for section, values in changes.items():
    config = with_section(config, section, **values)
  run_steps(config, tmp_path / "run")
  names = {name for row in read_metrics(tmp_path / "run") for name in row} - NO_METRICS
  assert "kl" in names and not {name for name in names if not is_known(name)}
