"""The cells of the stress test: every method at every level of every regime, with every seed.

A method is a preset, or a preset with other settings of its own. A level is how hard the runs are
made, for all methods alike. `stress.py` runs the cells, and `stress_page.py` writes the page.
"""

from collections.abc import Iterator, Mapping
import dataclasses
from pathlib import Path
from typing import Any

from grpo_jax.algo.presets import PRESETS
from grpo_jax.config import Config
from grpo_jax.recipes import load_config

STEPS, EVERY, OPERANDS = 24, 4, 3
LONGEST = 48  # where the reward is for length
# Shares of right draws of the warm starts, and the shares of worked solutions that are tried first.
TARGETS = {0.3: 0.45, 0.1: 0.19, 0.03: 0.065, 0.01: 0.02}
REWARDS = str(Path(__file__).with_name("stress_rewards.py"))
COMMON: dict[str, Any] = {
  "steps": STEPS,
  "warm_start.steps": 0,
  "data.task": "columns",
  "data.max_prompt_tokens": 9,
  "batch.prompts": 16,
  "sampling.max_tokens": 34,
  "algo.updates_per_batch": 1,
  "algo.minibatches": 4,
  "optimizer.learning_rate": 3e-4,
  "optimizer.schedule": "constant",
  "optimizer.warmup_steps": 0,
  "eval.every": EVERY,
  "checkpoint.every": 10_000,
  "log.completions_every": 0,
  "log.tensorboard": False,
  "reward.workers": 0,
}
# A coefficient so small that it moves nothing, so that every run reports its KL.
_NO_KL = {"algo.kl_coef": 1e-12, "algo.kl": "k3", "algo.kl_in": "loss"}


@dataclasses.dataclass(frozen=True)
class Level:
  """How hard a run is made.

  Attributes:
    settings: What it changes in COMMON.
    start: The share of right draws of the warm start.
    operands: Of each sum.
    methods: Those that run at it. None mean all.
    own: What it changes in the settings of every method.
  """

  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  start: float = 0.1
  operands: int = OPERANDS
  methods: tuple[str, ...] = ()
  own: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def _methods() -> dict[str, tuple[str, dict[str, Any]]]:
  """Each method's preset, and its settings beside those of the preset.

  A preset with a KL term is there twice: as it is, and without. Of `process` there is only the one
  without, because its KL is that of grpo. Presets whose bounds are for a ratio that is a mean over
  thousands of tokens are there with wider bounds, too: the deviation of such a ratio falls with the
  root of the length, so bounds for 32 tokens are about 16 times as wide as those for 8,000.
  """
  methods: dict[str, tuple[str, dict[str, Any]]] = {}
  for name, settings in PRESETS.items():
    if "kl_coef" not in settings:
      methods[name] = name, _NO_KL
    else:
      methods[name] = name, {}
      methods[f"{name}, no KL"] = name, _NO_KL
    if settings.get("ratio") == "sequence":
      bounds = {f"algo.{key}": 16 * settings[key] for key in ("clip_low", "clip_high")}
      methods[f"{name}, 16 x bounds"] = name, _NO_KL | bounds
  del methods["process"]  # its KL is that of grpo
  for for_stale_data in ("areal", "aipo", "m2po"):  # here all data is fresh
    del methods[for_stale_data]
  return methods


METHODS = _methods()
# Those without a KL term. gspo_token is gspo.
_WITHOUT_KL = tuple(
  name
  for name, (_, own) in METHODS.items()
  if _NO_KL.items() <= own.items() and name != "gspo_token"
)
_KL_OF_GRPO = {"algo.kl_coef": 0.04}
# For levels that ask about the sampler and not about the method.
_FEW = ("grpo, no KL", "cispo", "gspo, 16 x bounds", "gpg")


def _reuse(updates: int, rate: float) -> Level:
  minibatches = min(updates, 4)
  return Level(
    {
      "algo.minibatches": minibatches,
      "algo.updates_per_batch": updates // minibatches,
      "optimizer.learning_rate": rate,
    }
  )


def _noise(rate: float, kind: str) -> Level:
  return Level({"reward.functions": (f"{REWARDS}:noisy(rate={rate}, kind='{kind}')",)})


def _operands(count: int) -> Level:
  tokens = {"data.max_prompt_tokens": 3 * count, "sampling.max_tokens": 11 * count}
  return Level(tokens, operands=count)


def _bonus(size: float) -> Level:
  return Level(
    {
      "reward.functions": (f"{REWARDS}:long(bonus={size}, most={LONGEST})",),
      "sampling.max_tokens": LONGEST,
    }
  )


def _sampled(changes: Mapping[str, Any], correction: Mapping[str, Any] | None = None) -> Level:
  settings = {"algo.old_logprobs": "recomputed", **changes}
  return Level({**settings, **(correction or {})}, methods=_FEW if correction else ())


def _correction(kind: str, level: str, low: float, high: float) -> dict[str, Any]:
  return {
    "algo.correction": kind,
    "algo.correction_level": level,
    "algo.correction_low": low,
    "algo.correction_high": high,
  }


_SAMPLERS: dict[str, dict[str, Any]] = {
  "bfloat16": {"sampling.dtype": "bfloat16"},
  "top-p 0.9": {"sampling.top_p": 0.9},
  "int8": {"sampling.weights_dtype": "int8", "sampling.cache_dtype": "int8"},
}
_CORRECTIONS = {
  f"{name} {level}": _correction(kind, level, low, high)
  for name, kind, low, high in (
    ("TIS", "truncate", 0.0, 2.0),
    ("MIS", "mask", 0.0, 2.0),
    ("IcePop", "mask", 0.5, 5.0),
  )
  for level in ("token", "sequence")
}
BASE = "4 updates, 3e-4"  # the harmless end of most regimes
WITH_KL = "32 updates, 3e-4, all with KL 0.04"

_BONUSES = (0.1, 0.3, 1.0, 10.0)
_RATES, _UPDATES = ("3e-4", "1e-3"), (1, 2, 4, 8, 16, 32)
LEVELS: dict[str, Level] = {
  **{f"{n} updates, {rate}": _reuse(n, float(rate)) for rate in _RATES for n in _UPDATES},
  **{f"start {target:.0%}": Level(start=target) for target in TARGETS if target != 0.1},
  WITH_KL: dataclasses.replace(_reuse(32, 3e-4), methods=_WITHOUT_KL, own=_KL_OF_GRPO),
  "start 1%, 48 steps": Level({"steps": 2 * STEPS}, start=0.01),
  **{f"flipped {rate:.0%}": _noise(rate, "flipped") for rate in (0.1, 0.2, 0.3)},
  **{f"false positives {rate:.0%}": _noise(rate, "false_positives") for rate in (0.1, 0.2, 0.3)},
  **{f"{count} operands": _operands(count) for count in (4, 5)},
  **{f"bonus {size}": _bonus(size) for size in _BONUSES},
  **{sampler: _sampled(changes) for sampler, changes in _SAMPLERS.items()},
  **{
    f"{sampler}, {name}": _sampled(changes, correction)
    for sampler, changes in _SAMPLERS.items()
    for name, correction in _CORRECTIONS.items()
  },
}

# What the columns of the heat maps are, from harmless to hard.
REGIMES: dict[str, tuple[str, ...]] = {
  **{f"reuse, rate {rate}": tuple(f"{n} updates, {rate}" for n in _UPDATES) for rate in _RATES},
  "the KL term of grpo for all": ("32 updates, 3e-4", WITH_KL),
  "sparse": ("start 30%", BASE, "start 3%", "start 1%", "start 1%, 48 steps"),
  "flipped rewards": (BASE, "flipped 10%", "flipped 20%", "flipped 30%"),
  "false positives": (BASE, *(f"false positives {rate}%" for rate in (10, 20, 30))),
  "longer sums": (BASE, "4 operands", "5 operands"),
  "reward for length": tuple(f"bonus {size}" for size in _BONUSES),
  "mismatch": (BASE, *_SAMPLERS),
  **{
    f"corrections, {sampler}": (sampler, *(f"{sampler}, {name}" for name in _CORRECTIONS))
    for sampler in _SAMPLERS
  },
}

# The levels in the order in which they run: those that tell methods apart most come first. Those
# that are not named follow.
ORDER: tuple[str, ...] = (
  BASE,
  "16 updates, 3e-4",
  "flipped 20%",
  "start 1%",
  "8 updates, 3e-4",
  "flipped 30%",
  "false positives 30%",
  "start 3%",
  "start 1%, 48 steps",
  "32 updates, 3e-4",
  "8 updates, 1e-3",
  "4 updates, 1e-3",
  "bonus 0.3",
  "bonus 1.0",
  "bonus 10.0",
  WITH_KL,
  "top-p 0.9",
  *(f"top-p 0.9, {name}" for name in _CORRECTIONS),
  "5 operands",
  "bfloat16",
  "2 updates, 1e-3",
  "1 updates, 1e-3",
  "1 updates, 3e-4",
  "2 updates, 3e-4",
  "start 30%",
  "false positives 20%",
  "flipped 10%",
  "false positives 10%",
  "bonus 0.1",
  "4 operands",
  *(f"bfloat16, {name}" for name in _CORRECTIONS),
)


def family(level: str) -> tuple[tuple[str, Any], ...]:
  """Equal for levels whose runs differ in nothing that a compiled program reads."""
  without = ("reward.functions", "algo.updates_per_batch", "steps")
  settings = COMMON | dict(LEVELS[level].settings) | dict(LEVELS[level].own)
  return tuple(sorted((key, value) for key, value in settings.items() if key not in without))


@dataclasses.dataclass(frozen=True)
class Cell:
  """A run: a method at a level with a seed."""

  level: str
  method: str
  seed: int

  def config(self, starts: Path) -> Config:
    """The config of its run.

    Args:
      starts: The folder with the warm starts and the longer sums, as `stress.py` writes them.
    """
    level = LEVELS[self.level]
    preset, own = METHODS[self.method]
    settings = COMMON | dict(level.settings) | own | dict(level.own)
    settings |= {
      "seed": self.seed,
      "data.path": str(starts / f"sums_{level.operands}_1"),
      "model.path": str(starts / f"seed_{self.seed}" / f"start_{level.start:g}"),
    }
    return load_config(f"arithmetic:{preset}", settings)


def cells(seeds: int) -> Iterator[Cell]:
  """All cells with seeds 0 to `seeds` - 1, the most telling first."""
  for level in dict.fromkeys((*ORDER, *LEVELS)):
    for method in LEVELS[level].methods or METHODS:
      for seed in range(seeds):
        if _is_possible(level, method):
          yield Cell(level, method, seed)


def _is_possible(level: str, method: str) -> bool:
  """Whether a method can run at a level."""
  settings, preset = LEVELS[level].settings, METHODS[method][0]
  if preset == "process" and "reward.functions" in settings:  # needs a reward of steps
    return False
  if method == "gspo_token":  # where a row has one advantage, it differs from gspo by rounding
    return level in (BASE, "16 updates, 3e-4")
  by_row = PRESETS[preset].get("ratio", "token") != "token"
  return not (by_row and settings.get("algo.correction_level") == "token")
