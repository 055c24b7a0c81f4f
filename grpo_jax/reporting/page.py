"""The page: one HTML file that needs no network."""

from collections.abc import Sequence
import json
from typing import Any

import jinja2

from grpo_jax.reporting.completions import shown_completions
from grpo_jax.reporting.figures import figures
from grpo_jax.reporting.runs import SEED, Series, ShownRun, changed, differences, group
from grpo_jax.reporting.template import PAGE
from grpo_jax.settings import ConfigError

_ACCURACY = "eval/accuracy"


def page(runs: Sequence[ShownRun]) -> str:
  """The page of some runs.

  Args:
    runs: At least one, with different names.

  Raises:
    ConfigError: Bokeh is not installed.
  """
  try:
    import bokeh.embed
    import bokeh.resources
  except ImportError as error:
    raise ConfigError(f"a report needs Bokeh: pip install 'grpo_jax[report]' ({error})") from None
  series = group(runs)
  drawn = figures(series)
  script, parts = bokeh.embed.components(drawn) if drawn else ("", [])
  return (
    jinja2.Environment(autoescape=True)
    .from_string(PAGE)
    .render(
      title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
      runs=[_summary(run, series) for run in runs],
      differing=_differing(series),
      changed={run.name: changed(run) for run in _firsts(series)},
      bokeh=_bokeh_script(bokeh.resources) if drawn else "",
      script=script,
      figures=parts,
      completions=_as_script([shown_completions(run) for run in runs]),
    )
  )


def _bokeh_script(resources: Any) -> str:
  """Bokeh itself, without its widgets and formulas, which the page does not use."""
  return resources.Resources(mode="inline", components=["bokeh"]).render()


def _firsts(series: Sequence[Series]) -> list[ShownRun]:
  return [one.runs[0] for one in series]


def _summary(run: ShownRun, series: Sequence[Series]) -> dict[str, Any]:
  """A row of the table of runs."""
  low, high = run.newest(f"{_ACCURACY}_low"), run.newest(f"{_ACCURACY}_high")
  accuracy = run.newest(_ACCURACY)
  seconds = sum(row.get("time/step") or 0 for row in run.rows)
  shown = "-" if accuracy is None else f"{accuracy:.1%}"
  if low is not None and high is not None:
    shown += f" ({low:.1%} to {high:.1%})"
  return {
    "name": run.name,
    "series": next(one.label for one in series if run in one.runs),
    "seed": run.settings[SEED],
    "state": run.state,
    "accuracy": shown,
    "reward": _number(run.newest("reward")),
    "hours": _duration(seconds),
    "starts": [_start(start) for start in run.starts] or ["not recorded"],
  }


def _start(start: dict[str, Any]) -> str:
  """A start of a run in one line."""
  where = f"{start.get('devices')} x {start.get('device_kind')}"
  processes = start.get("processes", 1)
  if processes != 1:
    where += f" in {processes} processes"
  commit = f", commit {start['commit']}" if start.get("commit") else ""
  return f"{start.get('started')}: {where}, jax {start.get('jax')}{commit}"


def _differing(series: Sequence[Series]) -> dict[str, Any]:
  """The table of the settings in which the series differ."""
  settings = [one.runs[0].settings for one in series]
  keys = differences(settings)
  return {
    "labels": [one.label for one in series],
    "rows": [(key, [str(one.get(key, "-")) for one in settings]) for key in keys],
  }


def _duration(seconds: float) -> str:
  if seconds < 90:
    return f"{seconds:.0f} s"
  minutes, hours = seconds / 60, seconds / 3600
  return f"{minutes:.0f} min" if minutes < 90 else f"{hours:.1f} h"


def _number(value: float | None) -> str:
  return "-" if value is None else f"{value:.3g}"


def _as_script(value: Any) -> str:
  """JSON that can stand inside <script>: no text of a model can close it."""
  text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
  return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
