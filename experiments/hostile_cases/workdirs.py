# ruff: noqa: E501  (a row is a line)
"""Folders of runs: files damaged, missing, foreign or of the wrong kind, when a run goes on."""

import json
from pathlib import Path
import shutil
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
  Case("run/goes on", MORE, 0, ("resuming from step 3", "finished"), needs="run"),
  Case("run/is finished", "train $RUN", 0, ("finished",), needs="run"),
  Case(
    "run/is to become shorter",
    "train $RUN --config.steps=2",
    (0, 2),
    needs="run",
    may_change=(CONFIG,),
  ),
  Case("run/other seed", MORE + " --config.seed=1", 2, ("seed",), needs="run"),
  Case(
    "run/other model", MORE + " --config.model.num_layers=2", 2, ("model.num_layers",), needs="run"
  ),
  Case(
    "run/other preset",
    "train --config=tiny.py:gspo --workdir=run --config.steps=5",
    2,
    ("algo.",),
    needs="run",
  ),
  Case(
    "run/keep fewer",
    MORE + " --config.checkpoint.keep=1",
    0,
    ("finished",),
    needs="run",
    may_change=("run/checkpoints/*", CONFIG),
  ),
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
  _run("config with an unknown key", _set("algo.magic", 1), 2, "algo.magic"),
  _run("config with a missing section", edit_json(CONFIG, algo=...), (0, 2), may_change=(CONFIG,)),
  _run("config with a text for a section", edit_json(CONFIG, algo="x"), 2, "algo"),
  _run("config with a text for a number", _set("batch.prompts", "4"), 2, "batch.prompts"),
  _run(
    "config with nan", _set("optimizer.learning_rate", float("nan")), 2, "optimizer.learning_rate"
  ),
  _run("config unreadable", mode(CONFIG, 0), 2, CONFIG, as_user=True),
  _run("config not writable", mode(CONFIG, 0o444), (0, 2), as_user=True),
  _run(
    "half written config beside",
    write("run/config.json.new", "{"),
    0,
    "finished",
    may_change=("run/config.json.new", CONFIG),
  ),
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
  _run(
    "completions a file",
    (remove("run/completions"), write("run/completions", "x")),
    (1, 2),
    "completions",
  ),
  _run("completions with other files", write("run/completions/notes.txt", "x"), 0, "finished"),
  _run(
    "completions with a folder of a later step",
    make_folder("run/completions/000009.jsonl"),
    (0, 1, 2),
    "000009.jsonl",
  ),
  _run(
    "completions not writable",
    mode("run/completions", 0o555),
    (1, 2),
    "completions",
    as_user=True,
  ),
]


def _damaged(name: str, *steps: Step) -> Case:
  """The newest checkpoint is damaged: the run goes on from the one before."""
  words = ("damaged", "going on from step 2", "finished")
  return _run(
    f"newest checkpoint {name}", steps, 0, *words, may_change=(METRICS, CONFIG, "run/completions/*")
  )


FILES = "run/checkpoints/3"
DAMAGE = [
  _damaged("empty", remove(f"{FILES}/*")),
  _damaged("without a manifest", remove(f"{FILES}/manifest")),
  _damaged("with a cut manifest", cut(f"{FILES}/manifest/metadata")),
  _damaged("with a flipped manifest", flip(f"{FILES}/manifest/metadata")),
  _damaged("with an empty manifest", write(f"{FILES}/manifest/metadata", "")),
  _damaged("with another manifest", write(f"{FILES}/manifest/metadata", "[]")),
  _damaged("with cut parameters", cut(f"{FILES}/params/ocdbt.process_0/d/*")),
  _damaged("with flipped parameters", flip(f"{FILES}/params/ocdbt.process_0/d/*")),
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
  _damaged("with a fifo inside", fifo(f"{FILES}/params/_METADATA")),
  _damaged("that is a link to nothing", remove(FILES), link(FILES, "nowhere")),
  # The arrays are as they were saved: nothing is lost.
  _run("newest checkpoint with flipped ends", flip(f"{FILES}/params/ocdbt.process_0/d/*", 1.0), 0, "resuming from step 3", "finished"),
  _run("newest checkpoint without metadata", remove(f"{FILES}/params/_METADATA"), 0, "resuming from step 3", "finished"),
  _run("all checkpoints damaged", flip("run/checkpoints/*/params/ocdbt.process_0/d/*"), 2, "every checkpoint"),
  _run("all checkpoints empty", remove("run/checkpoints/*/*"), 2, "every checkpoint"),
]  # fmt: skip


def _copy(old: str, new: str) -> Step:
  def step(folder: Path) -> None:
    shutil.copytree(folder / old, folder / new)

  return step


STORE = [
  _run("checkpoints removed", remove(CHECKPOINTS), 0, "starting over", may_change=("run/completions/*", CONFIG)),
  _run("checkpoints a file", (remove(CHECKPOINTS), write(CHECKPOINTS, "x")), 2, "checkpoints"),
  _run("checkpoints a link", (move(CHECKPOINTS, "c"), link(CHECKPOINTS, "../c")), 0, "finished"),
  _run("checkpoints not writable", mode(CHECKPOINTS, 0o555), (1, 2), "checkpoints", as_user=True),
  _run("checkpoints unreadable", mode(CHECKPOINTS, 0), 2, "checkpoints", as_user=True),
  _run("a foreign file among them", write(f"{CHECKPOINTS}/notes.txt", "x"), 0, "finished"),
  _run("a file with a number as name", write(f"{CHECKPOINTS}/7", "x"), 0, "finished", may_change=(METRICS, CONFIG)),
  _run("a folder of other digits", make_folder(f"{CHECKPOINTS}/٩"), 0, "finished"),
  _run("a folder of leading zeros", make_folder(f"{CHECKPOINTS}/0009"), 0, "finished"),
  _run("a huge number", make_folder(f"{CHECKPOINTS}/99999999999999999999999"), 0, "finished"),
  _run("a negative number", make_folder(f"{CHECKPOINTS}/-1"), 0, "finished"),
  _run("a half written checkpoint", write(f"{CHECKPOINTS}/4.orbax-checkpoint-tmp-1/x", "x"), 0, "finished", may_change=("*tmp*",)),
  _run("a backup beside", _copy(FILES, f"{FILES}.bak"), 0, "finished"),
  _run("a damaged one set aside before", (make_folder(f"{FILES}.damaged"), remove(f"{FILES}/params")), 0, "damaged-2", may_change=(METRICS, CONFIG)),
  _run("a checkpoint under another number", move(FILES, f"{CHECKPOINTS}/4"), (0, 2), may_change=(METRICS, CONFIG)),
  _run("a checkpoint of another model", (remove(CHECKPOINTS), move("warm/checkpoints", CHECKPOINTS)), (0, 2), needs="run warm", may_change=(METRICS, CONFIG, "run/*")),
  _run("events of rubbish", write("run/events.out.tfevents.1.x", bytes(99)), 0, "finished"),
  _run("a file of the user", write("run/notes.txt", "x"), 0, "finished"),
]  # fmt: skip

GO_ON = (
  "train --config=tiny.py --workdir=warm --config.warm_start.steps=2 --config.warm_start.batch=4"
  " --config.algo.kl_coef=0.1 --config.steps=4"
)


def _warm(
  name: str, steps: tuple[Step, ...], code: int | tuple[int, ...], *words: str, **more: Any
) -> Case:
  return Case(
    f"run/{name}", more.pop("command", GO_ON), code, words, needs="warm", setup=steps, **more
  )


REFERENCE = [
  _warm("with a reference goes on", (), 0, "finished"),
  _warm("reference gone", (remove("warm/reference"),), 2, "reference"),
  _warm("reference empty", (remove("warm/reference/*"),), 2, "reference"),
  _warm("reference flipped", (flip("warm/reference/*/tree/ocdbt.process_0/d/*"),), 2, "reference"),
  _warm("reference without a manifest", (remove("warm/reference/*/manifest"),), 2, "reference"),
  _warm("reference a file", (remove("warm/reference"), write("warm/reference", "x")), 2, "reference"),
  _warm("reference gone but only sampled", (remove("warm/reference"),), 0, "--- 4:", command="sample --workdir=warm --prompt=1"),
  _warm("reference gone before it is made", (remove("warm/reference"), remove("warm/checkpoints/3"), remove("warm/checkpoints/4")), 0, "finished", may_change=("warm/metrics.jsonl", "warm/config.json", "warm/completions/*")),
]  # fmt: skip

EVALUATE = "evaluate --workdir=run"
READERS = [
  _run("evaluate: newest damaged", flip(f"{FILES}/params/ocdbt.process_0/d/*"), 0, "taking step 2", "95% interval", command=EVALUATE),
  _run("evaluate: that step damaged", flip(f"{FILES}/params/ocdbt.process_0/d/*"), 2, "damaged", command=EVALUATE + " --step=3"),
  _run("evaluate: all damaged", flip("run/checkpoints/*/params/ocdbt.process_0/d/*"), 2, "damaged", command=EVALUATE),
  _run("evaluate: optimizer gone", remove("run/checkpoints/*/opt_state"), 0, "95% interval", command=EVALUATE),
  _run("evaluate: metrics gone", remove(METRICS), 0, "95% interval", command=EVALUATE),
  _run("evaluate: config a list", write(CONFIG, "[]"), 2, CONFIG, command=EVALUATE),
  _run("evaluate: config of deep lists", write(CONFIG, "[" * 99_999 + "]" * 99_999), 2, CONFIG, command=EVALUATE),
  _run("evaluate: a wrong mesh", _set("mesh.data", 0), (0, 2), command=EVALUATE),
  _run("evaluate: another width", _set("model.mlp_dim", 64), 2, "checkpoints", command=EVALUATE),
  _run("evaluate: unreadable checkpoints", mode(CHECKPOINTS, 0), 2, "checkpoints", command=EVALUATE, as_user=True),
  _run("export: newest damaged", remove(f"{FILES}/params"), 0, "step 2", command="export --workdir=run --out=x"),
  _run("export: an unfinished run", _set("steps", 9), (0, 1, 2), command="export --workdir=run --out=x"),
  _run("sample: checkpoints a file", (remove(CHECKPOINTS), write(CHECKPOINTS, "x")), 2, "checkpoint", command="sample --workdir=run --prompt=1"),
]  # fmt: skip

CASES = [*CONFIGS, *ROWS, *DAMAGE, *STORE, *REFERENCE, *READERS]
