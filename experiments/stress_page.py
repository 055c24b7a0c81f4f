"""Draws what `stress.py` measured, and writes its tables.

  pip install -e '.[plot]' && python experiments/stress_page.py

It replaces what stands between <!-- NAME --> and <!-- end --> in experiments/stress.md, and prints
an analysis of variance of each level. All text outside is written by hand. It also writes the
pictures beside that page, and all of stress_tables.md.
"""

import argparse
from collections.abc import Mapping, Sequence
import re
import statistics
from typing import Any, NamedTuple

from needs import needs
import numpy as np
from scipy import stats
from stress import LINES, read_lines
from stress_cells import EVERY, METHODS, REGIMES, WITH_KL

with needs("pip install -e '.[plot]'"):
  import matplotlib.pyplot as plt

PAGE = LINES.with_name("stress.md")
TABLES = LINES.with_name("stress_tables.md")
# The heat maps of each picture: a regime, and what is shown, where that is not the accuracy.
PICTURES: dict[str, tuple[tuple[str, str], ...]] = {
  "reuse": (
    ("reuse, rate 3e-4", ""),
    ("reuse, rate 1e-3", ""),
    ("the KL term of grpo for all", ""),
  ),
  "sparse": (("sparse", ""), ("longer sums", "")),
  "noise": (("flipped rewards", ""), ("false positives", "")),
  "length": (("reward for length", ""), ("reward for length", "wasted")),
  "mismatch": (("mismatch", ""), ("corrections, top-p 0.9", ""), ("corrections, bfloat16", "")),
}
# Regimes whose levels go from harmless to hard.
BREAKING = [name for name in REGIMES if not name.startswith(("corrections", "the KL term"))]
# The curves of the page: a title, and for each line the level, the method and its label.
SURPRISES: dict[str, tuple[tuple[str, str, str], ...]] = {
  "gpg, 32 updates per batch": (
    ("32 updates, 3e-4", "gpg", "without a KL term"),
    (WITH_KL, "gpg", "with KL 0.04"),
  ),
  "30% of the rewards flipped": (
    ("flipped 30%", "reinforce_pp, no KL", "reinforce_pp, no KL"),
    ("flipped 30%", "gspo", "gspo"),
    ("flipped 30%", "remax", "remax"),
  ),
  "a bonus of 10 for length": (
    ("bonus 10.0", "vespo", "vespo"),
    ("bonus 10.0", "luspo", "luspo"),
  ),
}

Line = Mapping[str, Any]
Runs = Mapping[tuple[str, str], Sequence[Line]]  # (level, method) -> one line for each seed


def by_cell(lines: Sequence[Line]) -> Runs:
  """The lines of each level and method, by seed."""
  runs: dict[tuple[str, str], dict[int, Line]] = {}
  for line in lines:
    runs.setdefault((line["level"], line["method"]), {})[line["seed"]] = line
  return {cell: [line for _, line in sorted(found.items())] for cell, found in runs.items()}


def final(line: Line) -> float:
  """The accuracy at the end."""
  return line["accuracy"][-1]


def mean_of(runs: Runs, level: str, method: str, key: str = "") -> float:
  """The mean over the seeds of the final accuracy, or of a key of the lines. NaN if none has it."""
  lines = runs.get((level, method), ())
  values = [line.get(key) if key else final(line) for line in lines]
  known = [value for value in values if value is not None]
  return statistics.fmean(known) if known else float("nan")


def half_width(values: Sequence[float]) -> float:
  """Half of the 95% interval of a mean, by Student's t. NaN for fewer than two values."""
  if len(values) < 2:
    return float("nan")
  return float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))


def steps_to(line: Line, target: float = 0.8) -> int | None:
  """The first evaluated step at which the accuracy reaches the target."""
  return next((EVERY * i for i, one in enumerate(line["accuracy"]) if one >= target), None)


def collapsed_at(line: Line) -> int | None:
  """The first evaluated step from which the accuracy stays below half of its best until then.

  None if there is no such step, and where the best is below 10%.
  """
  accuracy = line["accuracy"]
  best = np.maximum.accumulate(accuracy)
  below = [one < 0.5 * most and most >= 0.1 for one, most in zip(accuracy, best)]
  if not below[-1]:
    return None
  return EVERY * (
    len(below) - next((i for i, one in enumerate(below[::-1]) if not one), len(below))
  )


def breaks_at(runs: Runs, levels: Sequence[str], method: str, drop: float = 0.1) -> str:
  """The first level at which a method is `drop` below its best of this regime, at a level before.

  "-" if there is none.
  """
  best = 0.0
  for level in levels:
    mean = mean_of(runs, level, method)
    if mean < best - drop:
      return level
    best = max(best, mean)
  return "-"


class Variance(NamedTuple):
  """An analysis of variance of the final accuracies at a level, with two factors.

  Attributes:
    methods: Standard deviation between the means of methods.
    seeds: Standard deviation between the means of seeds.
    rest: What remains of a run when both are known.
    F: The mean square of the methods over that of the rest.
    p: The chance of such an F if methods were equal.
    p_ranks: The same chance by Friedman's test, which reads only the order of the methods within
      each seed. So it does not mind that collapsed methods vary less than others.
    apart: How far apart the means of two methods have to be, so that with 95% no pair is farther
      apart if all methods are equal (Tukey's range test).
  """

  methods: float
  seeds: float
  rest: float
  F: float
  p: float
  p_ranks: float
  apart: float


def variance(accuracy_MS: np.ndarray) -> Variance:
  """Of the accuracies of M methods with S seeds."""
  M, S = accuracy_MS.shape
  mean = accuracy_MS.mean()
  methods_M, seeds_S = accuracy_MS.mean(1) - mean, accuracy_MS.mean(0) - mean
  rest_MS = accuracy_MS - mean - methods_M[:, None] - seeds_S
  between = S * (methods_M**2).sum() / (M - 1)
  rest = (rest_MS**2).sum() / ((M - 1) * (S - 1))
  F = between / rest if rest else float("inf")
  freedom = (M - 1) * (S - 1)
  p = float(stats.f.sf(F, M - 1, freedom))
  apart = float(stats.studentized_range.ppf(0.95, M, freedom) * np.sqrt(rest / S))
  p_ranks = float(stats.friedmanchisquare(*accuracy_MS).pvalue)
  return Variance(
    methods=methods_M.std(ddof=1),
    seeds=seeds_S.std(ddof=1),
    rest=float(np.sqrt(rest)),
    F=F,
    p=p,
    p_ranks=p_ranks,
    apart=apart,
  )


def variances(runs: Runs, seeds: int) -> dict[str, Variance]:
  """Of each level at which all its methods have run with all seeds."""
  found = {}
  for level in dict.fromkeys(name for levels in REGIMES.values() for name in levels):
    lines = [runs[level, method] for method in METHODS if (level, method) in runs]
    complete = [one for one in lines if len(one) == seeds]
    if len(complete) == len(lines) > 1:
      found[level] = variance(np.array([[final(line) for line in one] for one in complete]))
  return found


def variance_table(runs: Runs, seeds: int) -> list[str]:
  """A row for each level."""
  rows = [
    "| level | between methods | between seeds | rest | F | p | p by ranks | apart |",
    "|---" * 8 + "|",
  ]
  for level, one in variances(runs, seeds).items():
    spread = " | ".join(f"{100 * value:.1f}" for value in one[:3])
    chances = f"{one.F:.1f} | {one.p:.1g} | {one.p_ranks:.1g}"
    rows.append(f"| {level} | {spread} | {chances} | {100 * one.apart:.0f} |")
  return rows


def breaks_table(runs: Runs) -> list[str]:
  """A row for each method, and a column for each regime of which two levels have run."""
  regimes = [
    name for name, levels in REGIMES.items() if name in BREAKING and _can_compare(runs, levels)
  ]
  rows = [f"| method | {' | '.join(regimes)} |", "|---" * (len(regimes) + 1) + "|"]
  for method in METHODS:
    found = (breaks_at(runs, _columns(runs, REGIMES[name]), method) for name in regimes)
    cells = [_short(level).replace("\n", " ") for level in found]
    rows.append(f"| {method} | {' | '.join(cells)} |")
  return rows


def pairs_table(runs: Runs, drop: float = 0.1) -> list[str]:
  """A row for each preset that is there with and without one of its settings."""
  rows = [
    "| pair | levels | mean difference | at least 10 points better | at least 10 points worse |",
    "|---" * 5 + "|",
  ]
  for variant in METHODS:
    preset = METHODS[variant][0]
    levels = [level for level, method in runs if method == variant and (level, preset) in runs]
    if variant == preset or not levels:
      continue
    gaps = {one: mean_of(runs, one, variant) - mean_of(runs, one, preset) for one in levels}
    better = [f"{one} ({100 * gap:+.0f})" for one, gap in gaps.items() if gap >= drop]
    worse = [f"{one} ({100 * gap:+.0f})" for one, gap in gaps.items() if gap <= -drop]
    mean = 100 * statistics.fmean(gaps.values())
    found = [f"{variant} against {preset}", str(len(levels)), f"{mean:+.1f}"]
    rows.append(f"| {' | '.join([*found, '; '.join(better), '; '.join(worse)])} |")
  return rows


def regime_table(runs: Runs, levels: Sequence[str], key: str = "") -> list[str]:
  """A row for each method: mean and interval at each level."""
  has_run = _columns(runs, levels)
  rows = [f"| method | {' | '.join(has_run)} |", "|---" * (len(has_run) + 1) + "|"]
  for method in ranked(runs, has_run):
    cells = []
    for level in has_run:
      lines = runs.get((level, method), ())
      values = [line.get(key) if key else final(line) for line in lines]
      values = [value for value in values if value is not None]
      mean, half = (statistics.fmean(values), half_width(values)) if values else (None, None)
      width = "" if half is None or np.isnan(half) else f" ± {100 * half:.0f}"
      cells.append("" if mean is None else f"{100 * mean:.1f}{width}")
    rows.append(f"| {method} | {' | '.join(cells)} |")
  return rows


def cell_table(runs: Runs, level: str) -> list[str]:
  """What else was measured at a level: means over the seeds."""
  rows = [
    "| method | accuracy | steps to 80% | collapsed at | entropy | KL | largest ratio | clipped |",
    "|---" * 8 + "|",
  ]
  for method in ranked(runs, [level]):
    lines = runs[level, method]
    reached = ", ".join(_or_dash(steps_to(line)) for line in lines)
    collapsed = ", ".join(_or_dash(collapsed_at(line)) for line in lines)
    means = [
      f"{mean_of(runs, level, method, key):.3g}" for key in ("entropy", "kl", "ratio", "clipped")
    ]
    accuracy = f"{100 * mean_of(runs, level, method):.1f}%"
    stopped = sum("failure" in line for line in lines)
    name = f"{method} (stopped early: {stopped})" if stopped else method
    rows.append(f"| {' | '.join([name, accuracy, reached, collapsed, *means])} |")
  return rows


def _or_dash(step: int | None) -> str:
  return "-" if step is None else str(step)


def regime_sections(runs: Runs) -> list[str]:
  """A table for each regime of which two levels have run."""
  lines = []
  for regime, levels in REGIMES.items():
    if _can_compare(runs, levels):
      lines += [f"### {regime[0].upper()}{regime[1:]}", "", *regime_table(runs, levels), ""]
  if _can_compare(runs, REGIMES["reward for length"]):
    lines += ["### Reward for length: tokens beyond those of the worked solution, in percent", ""]
    lines += [*regime_table(runs, REGIMES["reward for length"], "wasted"), ""]
  return lines


def level_sections(runs: Runs) -> list[str]:
  """A table for each level that has run."""
  lines = []
  for level in dict.fromkeys(level for level, _ in runs):
    lines += [f"### {level}", "", *cell_table(runs, level), ""]
  return lines


def ranked(runs: Runs, levels: Sequence[str]) -> list[str]:
  """The methods that have run at these levels, the best mean first."""
  means = {
    method: [mean_of(runs, level, method) for level in levels if (level, method) in runs]
    for method in METHODS
  }
  known = {method: statistics.fmean(values) for method, values in means.items() if values}
  return sorted(known, key=lambda method: -known[method])


def heat_map(
  axes: plt.Axes, runs: Runs, regime: str, methods: Sequence[str], key: str = ""
) -> None:
  """A row for each of these methods and a column for each level of a regime."""
  levels = _columns(runs, REGIMES[regime])
  values = np.array([[mean_of(runs, one, method, key) for one in levels] for method in methods])
  axes.imshow(100 * values, aspect="auto", vmin=0, vmax=100, cmap="magma_r" if key else "viridis")
  for (row, column), value in np.ndenumerate(values):
    if not np.isnan(value):
      dark = value > 0.55 if key else value < 0.55
      color = "white" if dark else "black"
      axes.text(
        column, row, f"{100 * value:.0f}", ha="center", va="center", color=color, fontsize=7
      )
  axes.set_xticks(range(len(levels)), [_short(one) for one in levels], fontsize=7)
  axes.set_yticks(range(len(methods)), methods, fontsize=7)
  axes.set_title(f"{regime}: {key or 'accuracy'}, %", fontsize=9)


def _short(level: str) -> str:
  """A level as the label of a column."""
  if level == WITH_KL:
    return level.split(", ")[-1].replace(" with", "\nwith")
  if "updates" in level:
    count = level.split()[0]
    return f"{count} update{'s' * (count != '1')}"
  return level.replace(" ", "\n")


def draw_maps(runs: Runs) -> None:
  """Writes stress_reuse.png and so on, with the regimes of which two levels have run."""
  for name, maps in PICTURES.items():
    part = [(regime, key) for regime, key in maps if _can_compare(runs, REGIMES[regime])]
    if not part:
      continue
    figure, row = plt.subplots(
      1, len(part), figsize=(4.6 * len(part), 6.4), constrained_layout=True, squeeze=False
    )
    for axes, (regime, key) in zip(row[0], part):
      levels = REGIMES[regime]
      methods = ranked(runs, levels)
      compared = [one for one in methods if sum((level, one) in runs for level in levels) > 1]
      heat_map(axes, runs, regime, compared, key)
    figure.savefig(LINES.with_name(f"stress_{name}.png"), dpi=110)
    plt.close(figure)


def _can_compare(runs: Runs, levels: Sequence[str]) -> bool:
  """Whether two levels of a regime have run."""
  return len(_columns(runs, levels)) > 1


def _columns(runs: Runs, levels: Sequence[str]) -> list[str]:
  """Those of the levels that have run, in their order."""
  return [one for one in levels if any(level == one for level, _ in runs)]


def draw_surprises(runs: Runs) -> None:
  """Writes stress_curves.png: the accuracy of each seed, by step."""
  figure, row = plt.subplots(
    1, len(SURPRISES), figsize=(4.2 * len(SURPRISES), 3.2), sharey=True, constrained_layout=True
  )
  for axes, (title, curves) in zip(row, SURPRISES.items()):
    for number, (level, method, label) in enumerate(curves):
      for i, line in enumerate(runs.get((level, method), ())):
        accuracy = [100 * one for one in line["accuracy"]]
        steps = [EVERY * step for step in range(len(accuracy))]
        axes.plot(steps, accuracy, color=f"C{number}", lw=1.2, label=None if i else label)
    axes.set(title=title, xlabel="step", ylim=(0, 100))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
  row[0].set_ylabel("held-out greedy accuracy, %")
  figure.savefig(LINES.with_name("stress_curves.png"), dpi=110)
  plt.close(figure)


def with_tables(page: str, tables: Mapping[str, Sequence[str]]) -> str:
  """The page with these tables in their places."""
  for name, rows in tables.items():
    place = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
    text = "\n".join(rows) + "\n"
    page = place.sub(lambda found, text=text: f"{found[1]}{text}{found[2]}", page)
  return page


TABLES_HEAD = """# The tables of the stress test

`python experiments/stress_page.py` writes this file from [stress.jsonl](stress.jsonl).
[stress.md](stress.md) says what the runs are and what they show.

## Final accuracies

In percent, with the 95% interval of the mean (Student's t over the seeds). The best mean comes
first.

"""
LEVELS_HEAD = """## What else was measured

The steps and the collapse are those of each seed. An accuracy has collapsed when it falls below
half of its best until then and stays there. Entropy, KL and the share of clipped tokens are means
over the last eight steps, and the ratio is the largest of the run. A run stops early when many
updates in a row are not finite.

"""


def main() -> None:
  argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
  lines = read_lines()
  runs = by_cell(lines)
  seeds = 1 + max(line["seed"] for line in lines)
  hours = sum(line["seconds"] for line in lines) / 3600
  tables = {
    "size": [f"{len(lines)} runs, {hours:.1f} hours of one CPU core."],
    "variance": variance_table(runs, seeds),
    "breaks": breaks_table(runs),
    "pairs": pairs_table(runs),
  }
  PAGE.write_text(with_tables(PAGE.read_text(), tables))
  sections = [TABLES_HEAD, *regime_sections(runs), LEVELS_HEAD, *level_sections(runs)]
  TABLES.write_text("\n".join(sections).rstrip() + "\n")
  draw_maps(runs)
  draw_surprises(runs)
  print("\n".join(tables["variance"]))


if __name__ == "__main__":
  main()
