# ruff: noqa: E501  (a row is a line)
"""Folders of runs: files damaged, missing, foreign or of the wrong kind, when a run goes on."""

import json
from pathlib import Path
from typing import Any

from hostile_cases.case import (
  Case,
  Step,
  cut,
  edit_json,
  fifo,
  flip,
  link,
  make_folder,
  mode,
  move,
  remove,
  write,
)  # fmt: skip

MORE = "train $RUN --config.steps=5"  # the run of the fixture has 3 steps
METRICS, CONFIG, CHECKPOINTS = "run/metrics.jsonl", "run/config.json", "run/checkpoints"


def _run(
  name: str, steps: Step | tuple[Step, ...], code: int | tuple[int, ...], *words: str, **more: Any
) -> Case:
  """The run of the fixture, changed by the steps, goes on."""
  setup = steps if isinstance(steps, tuple) else (steps,)
  command, needs = more.pop("command", MORE), more.pop("needs", "run")
  return Case(f"run/{name}", command, code, words, needs=needs, setup=setup, **more)


def _append(file: str, content: str | bytes) -> Step:
  def step(folder: Path) -> None:
    with (folder / file).open("ab") as stream:
      stream.write(content.encode() if isinstance(content, str) else content)

  return step


def _lines(change: Any) -> Step:
  """Calls `change` with the list of the lines of metrics.jsonl."""

  def step(folder: Path) -> None:
    lines = (folder / METRICS).read_text().splitlines()
    (folder / METRICS).write_text("".join(f"{line}\n" for line in change(lines)))

  return step


def _set(path: str, value: Any) -> Step:
  """Sets a dotted key of config.json."""

  def step(folder: Path) -> None:
    values = json.loads((folder / CONFIG).read_text())
    *parents, last = path.split(".")
    section = values
    for key in parents:
      section = section[key]
    section[last] = value
    (folder / CONFIG).write_text(json.dumps(values))

  return step


CONFIGS = [
  _run("config cut off", cut(CONFIG), 2, CONFIG),
  _run("config empty", write(CONFIG, ""), 2, CONFIG),
  _run("config a list", write(CONFIG, "[]"), 2, CONFIG),
  _run("config null", write(CONFIG, "null"), 2, CONFIG),
  _run("config binary", write(CONFIG, bytes(range(256))), 2, CONFIG),
  _run("config of deep lists", write(CONFIG, "[" * 99_999 + "]" * 99_999), 2, CONFIG),
  _run("config with a long integer", write(CONFIG, '{"a": ' + "9" * 9_999 + "}"), 2, CONFIG),
  _run("config a folder", make_folder(CONFIG), 2, CONFIG),
  _run("config a fifo", fifo(CONFIG), 2, CONFIG, limit=40),
  _run("config gone", remove(CONFIG), 2, "run"),
  _run("config of another program", write(CONFIG, '{"width": 3}'), 2, CONFIG),
  _run(
    "more steps where the rate decays",
    _set("optimizer.schedule", "linear"),
    2,
    "optimizer.schedule = 'linear'",
    "grpo_jax.export --workdir=run",
    command=MORE + " --config.optimizer.schedule=linear",
  ),
  _run(
    "more steps where the rate decayed",
    _set("optimizer.schedule", "linear"),
    2,
    "optimizer.schedule = 'linear'",
    "grpo_jax.export --workdir=run",
  ),
  _run("more steps", (), 0, "finished", saved=5),
  _run(
    "calls are named later",
    (),
    0,
    "finished",
    saved=5,
    command=MORE + " --config.environment.calls=hermes",
  ),
  _run("config with an unknown key", _set("algo.magic", 1), 2, "algo.magic"),
  _run("config with a missing section", edit_json(CONFIG, algo=...), (0, 2), may_change=(CONFIG,)),
  _run("config with a text for a section", edit_json(CONFIG, algo="x"), 2, "algo"),
  _run("config with a text for a number", _set("batch.prompts", "4"), 2, "batch.prompts"),
  _run(
    "config with nan", _set("optimizer.learning_rate", float("nan")), 2, "optimizer.learning_rate"
  ),
  _run("config unreadable", mode(CONFIG, 0), 2, CONFIG, as_user=True),
  _run("config not writable", mode(CONFIG, 0o444), (0, 2), as_user=True),
]

ROWS = [
  _run(
    "metrics with rubbish inside",
    _lines(lambda x: [x[0], "rubbish", *x[1:]]),
    2,
    "metrics.jsonl line 2",
  ),
  _run(
    "metrics with a half line inside",
    _lines(lambda x: [x[0], x[1][:20], x[2]]),
    2,
    "metrics.jsonl line 2",
  ),
  _run(
    "metrics with a half last line",
    _append(METRICS, '{"step": 4, "rew'),
    0,
    "finished",
    may_change=(METRICS,),
  ),
  _run("metrics binary", write(METRICS, bytes(range(256))), 2, "metrics.jsonl"),
  _run(
    "metrics with an empty line", _lines(lambda x: [x[0], "", *x[1:]]), 2, "metrics.jsonl line 2"
  ),
  _run("metrics with a list", _lines(lambda x: [x[0], "[]", *x[1:]]), 2, "metrics.jsonl line 2"),
  _run(
    "metrics with a text as step",
    _lines(lambda x: ['{"step": "1"}', *x[1:]]),
    2,
    "metrics.jsonl line 1",
  ),
  _run(
    "metrics of deep lists",
    _lines(lambda x: [*x, "[" * 99_999 + "]" * 99_999]),
    2,
    "metrics.jsonl line 4",
  ),
  _run(
    "metrics with a long integer",
    _lines(lambda x: [*x, '{"step": ' + "9" * 9_999 + "}"]),
    2,
    "metrics.jsonl line 4",
  ),
  _run("metrics in another order", _lines(lambda x: x[::-1]), 2, "metrics.jsonl"),
  _run("metrics twice", _lines(lambda x: [*x, *x]), 2, "metrics.jsonl"),
  _run("metrics with a missing row", _lines(lambda x: [x[0], x[2]]), (0, 2), may_change=()),
  _run(
    "metrics with windows lines",
    write(METRICS, b'{"step": 1}\r\n{"step": 2}\r\n{"step": 3}\r\n'),
    0,
    "finished",
  ),
  _run("metrics a folder", (remove(METRICS), make_folder(METRICS)), 2, "metrics.jsonl"),
  _run("metrics a fifo", fifo(METRICS), 2, "metrics.jsonl", limit=40),
  _run("metrics a link", (move(METRICS, "m.jsonl"), link(METRICS, "../m.jsonl")), (0, 2)),
  _run(
    "metrics of later steps",
    _append(METRICS, '{"step": 4}\n{"step": 5}\n'),
    0,
    "finished",
    may_change=(METRICS,),
  ),
  _run("metrics not writable", mode(METRICS, 0o444), (1, 2), "metrics.jsonl", as_user=True),
]


def _damaged(name: str, *steps: Step) -> Case:
  """The newest checkpoint is damaged: the run goes on from the one before."""
  words = ("damaged", "going on from step 2", "finished")
  return _run(
    f"newest checkpoint {name}", steps, 0, *words, may_change=(METRICS, CONFIG, "run/completions/*")
  )


FILES = "run/checkpoints/3"
MANY = tuple(i / 16 for i in range(1, 16))
DAMAGE = [
  _damaged("empty", remove(f"{FILES}/*")),
  _damaged("without a manifest", remove(f"{FILES}/manifest")),
  _damaged("with a cut manifest", cut(f"{FILES}/manifest/metadata")),
  _damaged("with a flipped manifest", flip(f"{FILES}/manifest/metadata")),
  _damaged("with an empty manifest", write(f"{FILES}/manifest/metadata", "")),
  _damaged("with another manifest", write(f"{FILES}/manifest/metadata", "[]")),
  _damaged("with flipped parameters", flip(f"{FILES}/params/ocdbt.process_0/d/*", *MANY)),
  _damaged("without parameters", remove(f"{FILES}/params")),
  _damaged("without data of parameters", remove(f"{FILES}/params/ocdbt.process_0/d/*")),
  _damaged("with a cut index", cut(f"{FILES}/params/manifest.ocdbt")),
  _damaged("with flipped metadata", flip(f"{FILES}/params/_METADATA")),
  _damaged("with a cut optimizer", cut(f"{FILES}/opt_state/d/*")),
  _damaged("without an optimizer", remove(f"{FILES}/opt_state")),
  _damaged("without the host", remove(f"{FILES}/host/*")),
  _damaged("without a step", remove(f"{FILES}/step")),
  _damaged("with flipped coefficients", flip(f"{FILES}/coefs/d/*")),
  _damaged("that is a file", remove(FILES), write(FILES, "x")),
  # The arrays are as they were saved: nothing is lost.
  _run("newest checkpoint with flipped ends", flip(f"{FILES}/params/ocdbt.process_0/d/*", 1.0), 0, "resuming from step 3", "finished"),
  _run("newest checkpoint without metadata", remove(f"{FILES}/params/_METADATA"), 0, "resuming from step 3", "finished"),
]  # fmt: skip


GO_ON = (
  "train --config=tiny.py --workdir=warm --config.warm_start.steps=2 --config.warm_start.batch=4"
  " --config.algo.kl_coef=0.1 --config.steps=4 --config.sampling.max_tokens=12"
)


EVALUATE = "evaluate --workdir=run"
READERS = [
  _run("evaluate: newest damaged", flip(f"{FILES}/params/ocdbt.process_0/d/*", *MANY), 0, "taking step 2", "95% interval", command=EVALUATE),
  _run("evaluate: that step damaged", flip(f"{FILES}/params/ocdbt.process_0/d/*", *MANY), 2, "damaged", command=EVALUATE + " --step=3"),
  _run("evaluate: all damaged", flip("run/checkpoints/*/params/ocdbt.process_0/d/*", *MANY), 2, "damaged", command=EVALUATE),
  _run("evaluate: optimizer gone", remove("run/checkpoints/*/opt_state"), 0, "95% interval", command=EVALUATE),
  _run("evaluate: metrics gone", remove(METRICS), 0, "95% interval", command=EVALUATE),
  _run("evaluate: config a list", write(CONFIG, "[]"), 2, CONFIG, command=EVALUATE),
  _run("evaluate: config of deep lists", write(CONFIG, "[" * 99_999 + "]" * 99_999), 2, CONFIG, command=EVALUATE),
  _run("evaluate: a wrong mesh", _set("mesh.data", 0), (0, 2), command=EVALUATE),
  _run("evaluate: another width", _set("model.mlp_dim", 64), 2, "checkpoints", command=EVALUATE),
]  # fmt: skip

PAGE = "report run --out=page.html"
PARTIAL = """[]
null
{"prompt": "1+2="}
{"completion": "3"}
{"prompt": "1+2=", "completion": "3"}
{"prompt": ["1"], "completion": 3}
{"prompt": "1+2=", "completion": "3", "completion_ids": [3, 4], "logprobs": [null, -1], "reward": "high", "advantage": [1], "length": {}}
"""
REPORTS = [
  _run("report of completions that lack things", write("run/completions/000003.jsonl", PARTIAL), 0, "page.html: 1 run", command=PAGE, may_change=("run/completions/*",)),
  _run("report of completions that are no JSON", write("run/completions/000003.jsonl", b"{\xff"), 0, "page.html: 1 run", command=PAGE),
  _run("report of metrics that are texts and lists", _append(METRICS, '{"step": 4, "reward": "good", "kl": [1], "loss": NaN, "x": 1e999, "y": {"z": 1}}\n'), 0, "page.html: 1 run", command=PAGE),
  _run("report of a row without a step", write(METRICS, '{"reward": 1}\n{"step": 2}\n'), 2, "line 1 is not a row of metrics", command=PAGE),
  _run("report into a missing folder", (), 2, "--out=missing/page.html: no file can be written in missing", command="report run --out=missing/page.html"),
  _run("report into /proc", (), 2, "no file can be written in /proc", command="report run --out=/proc/page.html"),
  _run("report onto a named pipe", fifo("page.html"), 2, "page.html is not a regular file", command=PAGE),
]  # fmt: skip

CASES = [*CONFIGS, *ROWS, *DAMAGE, *READERS, *REPORTS]
