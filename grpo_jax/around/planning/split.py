"""The inputs of the simulator of asynchronous runs, and the table of its results."""

from collections.abc import Mapping, Sequence
import re

import numpy as np

from grpo_jax.around.planning.overlap import Outcome, Split, Workload, best
from grpo_jax.around.planning.phases import Phase, seconds_by_limit
from grpo_jax.around.planning.table import columns
from grpo_jax.config import Config
from grpo_jax.parallel.chips import Chip
from grpo_jax.run.stages import Program
from grpo_jax.sampler.sampling import longest_chunk
from grpo_jax.settings import ConfigError
from grpo_jax.storage.reading import completion_steps, read_completions, read_config

_STEPS_READ = 20  # the last steps of another run, whose completion lengths are read
_SIDES = ("sampler", "learner", "bound")
_MEASURED = ("steps/h", "speed", "sampler idle", "seats", "learner idle")
_EXPLAINED = (
  "sampler, learner: devices; bound: rollout.max_staleness; speed: against in turn; seats: the",
  "share with a row while the sampler decodes. Moving weights takes no time here.",
)


def job_of(config: Config, workdir: str | None, reward_seconds: float) -> Workload:
  """The work of a run with this config, for the simulator.

  Args:
    config: The config of the planned run.
    workdir: The folder of a run from whose saved completions the lengths are read. None means that
      every completion has sampling.max_tokens tokens.
    reward_seconds: How long it takes to score a batch.
  """
  P, G, T = config.batch.prompts, config.batch.group_size, config.sampling.max_tokens
  lengths_NG = np.full((1, G), T)
  if workdir is not None:
    lengths_NG = np.minimum(lengths_of(workdir, G), T)
  return Workload(
    prompts=P,
    lengths_NG=lengths_NG,
    seats=config.sampling.rows or P * G,
    # A new row draws its first token without a round. `or 1`, because with T = 1 a chunk would have
    # no round, and the simulation would not end.
    chunk=longest_chunk(T) - 1 or 1,
    reward_seconds=reward_seconds,
  )


def lengths_of(workdir: str, group_size: int) -> np.ndarray:
  """Reads the completion lengths that a run saved in its last steps: int [N, G], groups shuffled.

  If `group_size` differs from the run's, each group is resampled from its own members with
  replacement. A prompt with long completions then still has long ones.

  Raises:
    ConfigError: The folder does not hold a run, or the run has saved no completions.
  """
  rng = np.random.default_rng(0)
  saved_G = read_config(workdir).batch.group_size
  # Without saved steps, reading the newest one (None) raises an error with a good message.
  steps: Sequence[int | None] = completion_steps(workdir)[-_STEPS_READ:] or [None]
  lengths = [row["length"] for step in steps for row in read_completions(workdir, step)]
  lengths_NG = np.array(lengths, int).reshape(-1, saved_G)
  if saved_G != group_size:
    members = rng.integers(0, saved_G, (len(lengths_NG), group_size))
    lengths_NG = np.take_along_axis(lengths_NG, members, 1)
  # In random order, so that a simulated batch mixes groups of these steps.
  return rng.permutation(lengths_NG)


def times_of_flag(name: str, value: str) -> dict[int, float]:
  """Parses a flag such as --update_s=2:9.1,4:5 into times by number of devices.

  Raises:
    ConfigError: The flag has another format, repeats a number of devices, or has a time of 0.
  """
  pairs = [re.fullmatch(r"([1-9]\d*):(\d*\.?\d+)", part) for part in value.split(",")]
  times = {int(pair[1]): float(pair[2]) for pair in pairs if pair}
  if len(times) != len(pairs) or not all(times.values()):
    raise ConfigError(
      f"flag --{name}={value}: write DEVICES:TIME for each measured number of devices, such as"
      f" --{name}=2:9.1,4:5"
    )
  return times


def is_timed(program: Program) -> bool:
  """Whether the simulation needs the time of a program: it samples or learns in every step.

  Sampling the greedy completions that some advantages need is not simulated.
  """
  in_every_step = program.runs.isdecimal() and int(program.runs) > 0
  return in_every_step and (program.name == "sample" or not program.tokens)


def least_times(phases: Sequence[Phase], chip: Chip) -> tuple[float, float]:
  """The least seconds of a round of decoding, and of all work of the learner in a step.

  Args:
    phases: The compiled programs for which `is_timed` holds.
    chip: The peak rates of the chip.
  """
  # Compute, memory and links work at the same time, so the slowest of them is the bound.
  round_seconds = learner_seconds = 0.0
  for phase in phases:
    if phase.tokens:  # `open_loops` is the decoding loop, with a round for each token
      done = phase.counted.open_loops * (1 / phase.tokens)
      round_seconds = max(seconds_by_limit(done, chip).values())
    else:
      once = max(seconds_by_limit(phase.counted.whole, chip).values())
      learner_seconds += int(phase.runs) * once
  return round_seconds, learner_seconds


def time_lines(
  round_seconds: Mapping[int, float], update_seconds: Mapping[int, float]
) -> list[str]:
  """Formats the times that the simulation uses as a table, a row for each number of devices."""
  rows = [["devices", "round ms", "update s"]]
  for count in sorted({*round_seconds, *update_seconds}):
    times = (1e3 * round_seconds.get(count, np.nan), update_seconds.get(count, np.nan))
    rows.append([str(count), *("-" if np.isnan(x) else f"{x:.3g}" for x in times)])
  return columns(rows)


def split_lines(
  found: Sequence[Split], in_turn: Outcome, ahead: Outcome, devices: int
) -> list[str]:
  """Formats the table of all splits, its legend, and the best split.

  Args:
    found: The simulated splits.
    in_turn: The outcome of sampling and learning in turn on all devices.
    ahead: The same with rollout.max_staleness=1, where scoring overlaps with other work.
    devices: The number of devices.
  """
  rows = [[*_SIDES, *_MEASURED], [str(devices), "in turn", "0", *_cells(in_turn, in_turn)]]
  rows.append([str(devices), "in turn", "1", *_cells(ahead, in_turn)])
  for split in found:
    sides = [str(split.sampler), str(split.learner), str(split.bound)]
    rows.append([*sides, *_cells(split.outcome, in_turn)])
  chosen = best(found)
  verdict = (
    f"best: sampler {chosen.sampler}, learner {chosen.learner}, bound {chosen.bound}:"
    f" {_speed(chosen.outcome, in_turn)} times as fast as in turn"
  )
  fastest = min(in_turn, ahead, key=lambda outcome: outcome.step_seconds)
  if chosen.outcome.step_seconds >= fastest.step_seconds:
    how = "" if fastest is in_turn else " with a bound of 1"
    verdict = f"best: in turn on all devices{how}; no split is faster"
  return [*columns(rows), *_EXPLAINED, "", verdict]


def _cells(outcome: Outcome, in_turn: Outcome) -> list[str]:
  """The texts in the columns `_MEASURED`. The speed is relative to `in_turn`."""
  return [
    f"{outcome.steps_per_hour:,.1f}",
    _speed(outcome, in_turn),
    f"{outcome.sampler_idle:.0%}",
    f"{outcome.seats_filled:.0%}",
    f"{outcome.learner_idle:.0%}",
  ]


def _speed(outcome: Outcome, in_turn: Outcome) -> str:
  return f"{in_turn.step_seconds / outcome.step_seconds:.2f}"
