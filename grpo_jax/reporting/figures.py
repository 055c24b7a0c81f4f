"""The figures of a page, drawn by Bokeh."""

from collections.abc import Sequence
import dataclasses
from typing import Any

from grpo_jax.reporting.curves import PARTS, curve, metrics_of, step_seconds
from grpo_jax.reporting.runs import Series

# Okabe and Ito's colours, which colour-blind readers can tell apart, without their yellow.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES = ("solid", "dashed", "dotted", "dotdash")  # once the colours are used up


@dataclasses.dataclass(frozen=True)
class Panel:
  """A figure: its title, the unit of its axis, and its metrics (one line each, for each series).

  Attributes:
    title: What it shows.
    unit: Of its vertical axis.
    metrics: Names of metrics, with what the legend calls them if there are several.
    percent: Whether values are shown as percentages.
  """

  title: str
  unit: str
  metrics: tuple[tuple[str, str], ...]
  percent: bool = False


PANELS = (
  Panel("Held-out accuracy (greedy)", "accuracy", (("eval/accuracy", ""),), percent=True),
  Panel("Reward", "mean reward", (("reward", ""),)),
  Panel("Completion length", "tokens", (("completions/mean_length", ""),)),
  Panel("Dead groups: all rewards equal", "groups", (("frac_reward_zero_std", ""),), True),
  Panel("Entropy", "nats per token", (("entropy", ""),)),
  Panel("KL to the reference", "nats per token", (("kl", ""),)),
  Panel(
    "Clipped tokens",
    "share of tokens",
    (("clip_ratio/low_mean", "low"), ("clip_ratio/high_mean", "high")),
    percent=True,
  ),
  Panel("Completions cut off", "share", (("completions/clipped_ratio", ""),), percent=True),
  Panel("Gradient norm", "before clipping", (("grad_norm", ""),)),
  Panel("Warm start: loss", "nats per token", (("warm_start/loss", ""),)),
)


def figures(series: Sequence[Series]) -> list[Any]:
  """A Bokeh figure for each panel of which a run has a metric."""
  present = metrics_of(series)
  made = [
    _figure(panel, series)
    for panel in PANELS
    if any(metric in present for metric, _ in panel.metrics)
  ]
  return [*made, _times(series)] if "time/sample" in present else made


def _figure(panel: Panel, series: Sequence[Series]) -> Any:
  from bokeh.models import DataRange1d, HoverTool, Legend, NumeralTickFormatter
  from bokeh.plotting import figure

  made = figure(
    title=panel.title,
    height=300,
    sizing_mode="stretch_width",
    tools="xpan,xwheel_zoom,box_zoom,reset,save",
    x_axis_label="step",
    y_axis_label=panel.unit,
  )
  made.toolbar.autohide = True
  made.xaxis.formatter = NumeralTickFormatter(format="0,0")
  if panel.percent:
    made.yaxis.formatter = NumeralTickFormatter(format="0.[0]%")
    made.y_range = DataRange1d(start=0, min_interval=0.01)
  items = []
  for number, (one, (metric, part)) in enumerate(_lines(panel, series)):
    renderers = _draw(made, one, metric, number)
    if renderers:
      label = ": ".join(filter(None, (one.label if len(series) > 1 or not part else "", part)))
      items.append((label, renderers))
  shown = "@y{0.0%}" if panel.percent else "@y{0.[0000]}"
  tips = [("step", "@x{0,0}"), (panel.unit, shown)]
  made.add_tools(HoverTool(tooltips=tips, renderers=[found[-1] for _, found in items]))
  if len(items) > 1:
    legend = Legend(items=items, click_policy="hide", label_text_font_size="9pt", padding=2)
    legend.nrows = -(-len(items) // 2)
    made.add_layout(legend, "below")  # beside the curves, and never on them
  return made


def _lines(panel: Panel, series: Sequence[Series]) -> list[tuple[Series, tuple[str, str]]]:
  return [(one, metric) for one in series for metric in panel.metrics]


def _draw(made: Any, one: Series, metric: str, number: int) -> list[Any]:
  """Draws a line with its band. Returns what it drew, the line last."""
  found = curve(one, metric)
  if found is None:
    return []
  color = COLORS[number % len(COLORS)]
  dash = DASHES[number // len(COLORS) % len(DASHES)]
  renderers = []
  if found.low is not None:
    band = made.varea(found.steps, found.low, found.high, fill_color=color, fill_alpha=0.15)
    renderers.append(band)
  if len(found.steps) == 1:
    renderers.append(made.scatter(found.steps, found.values, color=color, size=6))
  else:
    line = made.line(found.steps, found.values, color=color, line_width=2, line_dash=dash)
    renderers.append(line)
  return renderers


def _times(series: Sequence[Series]) -> Any:
  """Bars of the seconds that the parts of a step take."""
  from bokeh.plotting import figure

  seconds = [step_seconds(one) for one in series]
  labels = [one.label for one in series]
  made = figure(
    title="Time of a GRPO step by part",
    height=max(170, 110 + 34 * len(series)),
    sizing_mode="stretch_width",
    y_range=labels[::-1],
    x_axis_label="seconds: the median over steps",
    tools="save",
    tooltips="$name: @$name{0.[000]} s",
  )
  made.toolbar.autohide = True
  data = {"series": labels, **{part: [one[part] for one in seconds] for part in PARTS}}
  colors = COLORS[: len(PARTS)]
  made.hbar_stack(
    PARTS, y="series", height=0.6, color=colors, source=data, legend_label=list(PARTS)
  )
  made.x_range.start = 0
  made.legend.orientation = "horizontal"
  made.add_layout(made.legend[0], "below")
  return made
