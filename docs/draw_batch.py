"""Draws docs/way_of_a_batch.svg: a step's data with its shapes, from the prompts to the parameters.

python docs/draw_batch.py

tests/batch_picture_test.py compares the table below with the code, and the picture with the table.
"""

from html import escape
from pathlib import Path
from typing import NamedTuple

PICTURE = Path(__file__).with_name("way_of_a_batch.svg")


class Station(NamedTuple):
  """A file on the way.

  Attributes:
    file: Below grpo_jax/.
    functions: What computes there.
    does: Two lines at most.
    makes: (array, what it is): what it hands on.
    helpers: (file, what it gives): what it calls beside the way.
  """

  file: str
  functions: tuple[str, ...]
  does: tuple[str, ...]
  makes: tuple[tuple[str, str], ...]
  helpers: tuple[tuple[str, str], ...] = ()


STATIONS = (
  Station(
    "training/loop.py",
    ("run_steps", "GrpoStep"),
    ("One step: collect a batch, find its advantages,", "update the parameters as often as asked."),
    (
      ("params", "the policy"),
      ("index", "the number of the step"),
      ("host", "what the host keeps"),
    ),
    (("training/trainer.py", "set-up, checks and saving"), ("training/state.py", "the reference")),
  ),
  Station(
    "batches/collect.py",
    ("Collector", "Collected"),
    (
      "Draws P prompts, lets the policy complete each",
      "G times, and lets reward functions score them.",
    ),
    (
      ("prompts_PS", "the prompts"),
      ("tokens_PGT", "their completions"),
      ("sampled_PGT", "which tokens are the policy's"),
      ("logprobs_PGT", "the sampler's log-probs"),
      ("scores_PGJ", "the scores of J functions"),
    ),
    (
      ("batches/flow.py", "draws groups"),
      ("sampler/rows.py", "tokens, log-probs"),
      ("scoring/scorer.py", "scores_PGJ"),
    ),
  ),
  Station(
    "algo/batch.py",
    ("to_batch", "with_advantages"),
    ("Says which tokens are in the loss, and compares", "each completion with its group."),
    (
      ("completions_PGT", "the completions"),
      ("mask_PGT", "1 at tokens of the loss"),
      ("advantages_PGT", "their advantages"),
    ),
    (("algo/advantages/group.py", "advantages [P, G]"),),
  ),
  Station(
    "learner/train_step.py",
    ("train_step",),
    ("Computes the policy's log-probs with a gradient,", "a micro-batch at a time."),
    (("logprobs_PGT", "the policy's log-probs"), ("entropies_PGT", "their entropies")),
    (
      ("learner/objectives.py", "the objective, grpo"),
      ("learner/token_stats.py", "logprobs_PGT, entropies_PGT"),
      ("learner/features.py", "hidden states"),
    ),
  ),
  Station(
    "algo/objective.py",
    ("objective",),
    ("Ratio, surrogate and KL of each token, and", "their aggregation: the loss, a scalar."),
    (("loss", "of a batch or a part of it"),),
    (
      ("algo/ratios.py", "ratio_PGT"),
      ("algo/surrogates/clipped.py", "loss_PGT"),
      ("algo/kl.py", "kl_PGT"),
      ("algo/aggregation.py", "sum and weight"),
    ),
  ),
)
LAST = "learner/train_step.py differentiates it, adds gradients up, and changes the parameters."

_WIDTH, _LEFT, _BOX, _HELPERS = 960, 30, 400, 590
_LINE, _PADDING = 19, 14


def picture() -> str:
  """The SVG."""
  y, parts = 54, [_text(_LEFT, 30, "The way of a batch: five files", "title")]
  for number, station in enumerate(STATIONS, start=1):
    height = 2 * _PADDING + _LINE * (2 + len(station.does))
    parts.append(_box(_LEFT, y, _BOX, height, "station"))
    parts.append(_text(_LEFT + 16, y + 30, f"{number}  grpo_jax/{station.file}", "file"))
    parts.append(_text(_LEFT + 40, y + 30 + _LINE, ", ".join(station.functions), "code"))
    for line, text in enumerate(station.does, start=2):
      parts.append(_text(_LEFT + 40, y + 30 + _LINE * line, text, "does"))
    for line, (file, gives) in enumerate(station.helpers):
      at = y + 24 + line * (_LINE + 2)
      parts.append(_line(_LEFT + _BOX, at - 5, _HELPERS - 10, at - 5, "aside"))
      parts.append(_text(_HELPERS, at, f"{file}: {gives}", "helper"))
    y += height
    gap = _LINE * len(station.makes) + 26
    middle = _LEFT + 60
    parts.append(_line(middle, y, middle, y + gap - 8, "way"))
    parts.append(f'<path class="head" d="M{middle - 6} {y + gap - 9} h12 l-6 9 z"/>')
    for line, (array, meaning) in enumerate(station.makes):
      at = y + 24 + _LINE * line
      parts.append(_text(middle + 18, at, array, "code"))
      parts.append(_text(middle + 190, at, meaning, "does"))
    y += gap
  parts.append(_box(_LEFT, y, _WIDTH - 2 * _LEFT, 46, "station"))
  parts.append(_text(_LEFT + 16, y + 28, LAST, "does"))
  height = y + 90
  legend = "P prompts, G completions of each, S and T tokens, J reward functions"
  parts.append(_text(_LEFT, height - 16, legend, "helper"))
  return _PAGE.format(width=_WIDTH, height=height, parts="\n".join(parts))


_PAGE = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>The way of a batch through five files</title>
<style>
text {{ font: 14px sans-serif; fill: #222 }}
.title {{ font-size: 20px; font-weight: bold }}
.file {{ font-size: 15px; font-weight: bold }}
.code {{ font-family: monospace; fill: #124d80 }}
.helper {{ font-size: 13px; fill: #555 }}
.station {{ fill: #eef4fa; stroke: #4a7fb0 }}
.way {{ stroke: #4a7fb0; stroke-width: 3 }}
.head {{ fill: #4a7fb0 }}
.aside {{ stroke: #aaa; stroke-dasharray: 3 3 }}
</style>
<rect width="100%" height="100%" fill="#fff"/>
{parts}
</svg>
"""


def _text(x: int, y: int, text: str, kind: str) -> str:
  return f'<text class="{kind}" x="{x}" y="{y}">{escape(text)}</text>'


def _box(x: int, y: int, width: int, height: int, kind: str) -> str:
  return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>'


def _line(x1: int, y1: int, x2: int, y2: int, kind: str) -> str:
  return f'<line class="{kind}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>'


if __name__ == "__main__":
  PICTURE.write_text(picture())
