"""Renders the page, one HTML file that needs no network, from the templates in `web/`."""

from collections.abc import Sequence
import gzip
import json
from pathlib import Path
from typing import Any

import jinja2

from grpo_jax.around.reporting.completions import shares, shown_completions
from grpo_jax.around.reporting.curves import PARTS, curves, points_of_each, shown_metrics
from grpo_jax.around.reporting.runs import (
  SEED,
  Series,
  ShownRun,
  changed,
  differences,
  group,
  short_names,
  written,
)

WEB = Path(__file__).parent / "web"
_ACCURACY = "eval/accuracy"


def _text_of(path: Path) -> str:
  """Reads a text file. A .gz file is a minified library, compressed to keep it out of searches."""
  content = path.read_bytes()
  return (gzip.decompress(content) if path.suffix == ".gz" else content).decode()


def page(runs: Sequence[ShownRun]) -> str:
  """Renders the HTML page of these runs.

  Args:
    runs: At least one run. All have different names.
  """
  series = group(runs)
  differing = differences([a_series.runs[0].settings for a_series in series])
  most_points, share = points_of_each(len(runs)), shares(len(runs))
  data = {
    "runs": [
      {"name": run.name, "series": _number_of(run, series), **curves(run, most_points)}
      for run in runs
    ],
    "series": [a_series.label for a_series in series],
    "metrics": shown_metrics(runs),
    "parts": PARTS,
  }
  files = {path.name.removesuffix(".gz"): _text_of(path) for path in WEB.iterdir()}
  return (
    jinja2.Environment(autoescape=True)
    .from_string(files["page.html"])
    .render(
      title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
      columns=_columns(differing),
      runs=[_summary(run, differing) for run in runs],
      settings=[_settings(a_series) for a_series in series],
      files=files,
      data=_as_script(data),
      completions=_as_script([shown_completions(run, share) for run in runs]),
    )
  )


def _number_of(run: ShownRun, series: Sequence[Series]) -> int:
  """The index of the series that contains the run."""
  return next(number for number, one in enumerate(series) if run in one.runs)


def _columns(differing: Sequence[str]) -> list[tuple[str, str]]:
  """The header and tooltip of each column of the table of runs, for `differing` settings."""
  names = short_names(differing)
  return [
    ("run", "the name of its folder"),
    ("seed", SEED),
    ("state", "its steps, those of the warm start included"),
    ("accuracy", "held-out accuracy of the newest evaluation, with its 95% interval"),
    ("reward, mean of 10", "mean of the ten newest steps in the log"),
    ("time", "of its steps and evaluations"),
    *((names[key], key) for key in differing),
  ]


def _summary(run: ShownRun, differing: Sequence[str]) -> list[tuple[str, str]]:
  """The row of a run in the table of runs: the text and the sort key of each column."""
  columns, settings = run.columns, run.settings
  accuracy, reward = columns.newest(_ACCURACY), columns.newest("reward", 10)
  low, high = columns.newest(f"{_ACCURACY}_low"), columns.newest(f"{_ACCURACY}_high")
  shown = "-" if accuracy is None else f"{accuracy:.1%}"
  if accuracy is not None and low is not None and high is not None:
    shown += f" ({low:.1%} to {high:.1%})"
  seconds = float(columns.seconds_N[-1]) if len(columns.steps) else 0.0
  return [
    (run.name, run.name),
    (str(settings[SEED]), str(settings[SEED])),
    (run.state, str(run.step)),
    (shown, _sorted_by(accuracy)),
    ("-" if reward is None else f"{reward:.3g}", _sorted_by(reward)),
    (_duration(seconds), str(seconds)),
    *((written(settings.get(key)), str(settings.get(key))) for key in differing),
  ]


def _sorted_by(value: float | None) -> str:
  return "" if value is None else str(value)


def _settings(one: Series) -> dict[str, Any]:
  """The changed settings of a series and the starts of its runs, as the template needs them."""
  rows = [
    (key, written(value), written(default))
    for key, (value, default) in changed(one.runs[0]).items()
    if key != SEED or len(one.runs) == 1
  ]
  starts = [(run.name, [_start(start) for start in run.starts]) for run in one.runs]
  return {"label": one.label, "rows": rows, "starts": starts}


def _start(start: dict[str, Any]) -> str:
  """Describes a start of a run in one line: when, on which devices, with which code."""
  where = f"{start.get('devices')} x {start.get('device_kind')}"
  processes = start.get("processes", 1)
  if processes != 1:
    where += f" in {processes} processes"
  commit = f", commit {start['commit']}" if start.get("commit") else ""
  return f"{start.get('started')}: {where}, jax {start.get('jax')}{commit}"


def _duration(seconds: float) -> str:
  if seconds < 90:
    return f"{seconds:.0f} s"
  minutes, hours = seconds / 60, seconds / 3600
  return f"{minutes:.0f} min" if minutes < 90 else f"{hours:.1f} h"


def _as_script(value: Any) -> str:
  """JSON for a <script> element. Escapes <, > and &, so that no completion can close it."""
  text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
  return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
