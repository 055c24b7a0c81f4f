"""The report: runs as columns, what the page computes and shows of them, and hostile folders."""

import dataclasses
import html
import json
import os
from pathlib import Path
import shutil
import subprocess
import sys

import numpy as np
import pytest

from grpo_jax.around.reporting import completions, curves, runs
from grpo_jax.around.reporting.columns import columns_of
from grpo_jax.around.reporting.page import WEB, page
from grpo_jax.config import Config, Log, Optimizer, to_dict
from grpo_jax.data.tokenizers import tokenizer
from grpo_jax.settings import ConfigError

ROOT = Path(__file__).parents[1]
HOSTILE = "</script><img src=x onerror=alert(1)>&amp;#### 7"


def make_run(folder, rows=(), seed=0, rate=1e-3, steps=4, saved=()):
  """The folder of a run with these rows of metrics. `saved`: the steps with completions."""
  (folder / "completions").mkdir(parents=True)
  config = Config(seed=seed, steps=steps, optimizer=Optimizer(learning_rate=rate), log=Log(every=1))
  config = dataclasses.replace(config, batch=dataclasses.replace(config.batch, group_size=2))
  (folder / "config.json").write_text(json.dumps(to_dict(config)))
  (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  for step in saved:
    lines = (json.dumps(row) + "\n" for row in completion_rows())
    (folder / "completions" / f"{step:06d}.jsonl").write_text("".join(lines))
  return runs.read_run(str(folder))


def completion_rows():
  """Two groups of two. The first one has no advantages."""
  tokens = tokenizer.characters("0123456789+-=;# ")
  for prompt, text, advantage in (
    ("1+1=", "2", 0.0),
    ("1+1=", "2", 0.0),
    ("3+4=", HOSTILE, 1.0),
    ("3+4=", "8", -1.0),
  ):
    ids = tokens.encode("#### 7")
    yield {
      "prompt": prompt,
      "completion": text,
      "reward": float(advantage > 0),
      "rewards/strict": float(advantage > 0),
      "length": len(ids),
      "stopped_by": 1,
      "prompt_ids": [2],
      "completion_ids": ids,
      "logprobs": [-0.5] * len(ids),
      "advantage": advantage,
      "extra/read": HOSTILE,
      "extra/steps": ["7"] * 200,
      "extra/nothing": None,
      "turns": [
        {"role": "assistant", "text": "##", "start": 0, "end": 2, "reward": 0.5},
        {"role": "tool", "text": "##", "start": 2, "end": 4, "reward": None},
        {"role": "assistant", "text": " 7", "start": 4, "end": 6, "reward": None},
      ],
    }


def rows_of(**values):
  """Rows of metrics of steps 1, 2, ... with these values."""
  count = len(next(iter(values.values())))
  return [
    {"step": i + 1} | {name.replace("__", "/"): column[i] for name, column in values.items()}
    for i in range(count)
  ]


def test_runs_that_differ_in_their_seeds_alone_are_a_series(tmp_path):
  made = [
    make_run(tmp_path / "a0", seed=0, rate=0.1 * 0.003),  # 0.00030000000000000003
    make_run(tmp_path / "a1", seed=1, rate=0.1 * 0.003),
    make_run(tmp_path / "b0", rate=1e-5),
  ]
  a, b = runs.group(made)
  assert [run.name for run in a.runs] == ["a0", "a1"] and [run.name for run in b.runs] == ["b0"]
  assert a.label == "learning_rate 0.0003 (2 seeds)" and b.label == "learning_rate 1e-5"


@pytest.mark.parametrize(
  "value, text",
  [
    (0.1 * 0.003, "0.0003"),
    (5e-05, "5e-5"),
    (1e6, "1000000"),
    (0.99999999, "0.99999999"),
    (2.0, "2"),
    (float("inf"), "inf"),
    (True, "True"),
    (("strict", "format"), "strict, format"),
    ((), "none"),
    ("", "none"),
  ],
)
def test_settings_are_written_as_people_write_them(value, text):
  assert runs.written(value) == text


def test_keys_with_equal_last_parts_are_named_whole():
  names = runs.short_names(["model.path", "data.path", "seed"])
  assert names == {"model.path": "model.path", "data.path": "data.path", "seed": "seed"}


def test_rows_become_columns_and_what_is_no_finite_number_is_counted():
  columns = columns_of(
    [
      {"step": 1, "reward": None, "kl": 0.5, "note": "text", "flag": True},
      {"step": 3, "reward": 2, "kl": float("nan"), "list": [1.0]},
      {"step": 4, "reward": 5, "kl": 10**400},
    ]
  )
  assert columns.steps.tolist() == [1, 3, 4] and set(columns.values) == {"reward", "kl"}
  assert columns.left_out == {"reward": 1, "kl": 2, "note": 1, "flag": 1, "list": 1}
  assert columns.newest("kl") == 0.5 and columns.newest("note") is None
  assert columns.newest("reward") == 5 and columns.newest("reward", 10) == 3.5


def test_the_curves_of_a_run_have_tables_of_the_metrics_of_the_same_rows(tmp_path):
  rows = [{"step": 1, "warm_start/loss": 3.0, "time/step": 10.0}]
  rows.append({"step": 2, "warm_start/loss": 2.0, "time/step": 10.0, "eval/accuracy": 0.5})
  rows.append({"step": 4, "reward": 0.25, "num_tokens": 70, "time/step": 4.0})
  run = make_run(tmp_path / "a", rows)
  config = dataclasses.replace(
    run.config, warm_start=dataclasses.replace(run.config.warm_start, steps=2)
  )
  found = curves.curves(dataclasses.replace(run, config=config))
  by_metric = {name: table for table in found["tables"] for name in table["values"]}
  assert by_metric["warm_start/loss"]["step"] == [1, 2]
  assert by_metric["warm_start/loss"]["tokens"] == [None, 0]  # step 2 ends the warm start
  assert by_metric["reward"]["tokens"] == [70] and by_metric["reward"]["step"] == [4]
  # The row of step 4 stands for the two steps since that of step 2.
  assert by_metric["reward"]["hours"] == [round(28 / 3600, 6)]
  assert found["warm"] == 2 and found["left_out"] == {}


def test_long_curves_are_means_of_neighbours():
  squares = np.arange(1, 11, dtype=float) ** 2
  assert curves.thinned(squares, most=5).tolist() == [2.5, 12.5, 30.5, 56.5, 90.5]
  assert curves.thinned(np.arange(1, 11, dtype=float), most=3).tolist() == pytest.approx(
    [2, 5, 8.5]
  )
  assert curves.thinned(squares, most=10) is squares
  assert curves.thinned(np.full(10, 1.7e308), most=3).max() < float("inf")
  assert [curves.points_of_each(runs) for runs in (1, 15, 30)] == [600, 600, 300]


def test_the_time_of_a_step_is_the_median_and_what_no_part_explains():
  rows = rows_of(
    time__sample=[90.0, 1.0, 2.0], time__update=[90.0, 3.0, 4.0], time__step=[200.0, 7.0, 8.0]
  )
  assert curves.step_seconds(columns_of(rows)) == {
    "sample": 2.0,
    "reward": 0.0,
    "reference": 0.0,
    "update": 4.0,
    "other": 2.0,
  }


def test_the_ends_of_an_interval_are_no_metrics_of_their_own(tmp_path):
  rows = rows_of(eval__accuracy=[0.5], eval__accuracy_low=[0.4], eval__accuracy_high=[0.6])
  rows[0] |= {"clip_ratio/low_mean": 0.1, "reward": 1.0}
  shown = curves.shown_metrics([make_run(tmp_path / "a", rows)])
  assert [metric["name"] for metric in shown] == ["eval/accuracy", "reward", "clip_ratio/low_mean"]


NODE = shutil.which("node")
# One run: a warm start of two steps, then GRPO with an evaluation at its end.
RUN_IN_PAGE = """{warm: 2, tables: [
  {step: [1, 2], tokens: [null, 0], hours: [1, 2], values: {"warm_start/loss": [4, 2]}},
  {step: [2, 4], tokens: [0, 9], hours: [2, 4],
   values: {acc: [0, 1], acc_low: [-1, 0], acc_high: [1, 2]}}]}"""


@pytest.mark.skipif(not NODE, reason="needs node")
@pytest.mark.parametrize(
  "expression, value",
  [
    # By hand: sums 0.5, 1.25, 2.125 over weights 0.5, 0.75, 0.875.
    ("smooth([1, 2, 3], 0.5)", [1, 1.25 / 0.75, 2.125 / 0.875]),
    ("smooth([5, 5, 5], 0.99)", [5, 5, 5]),
    ("smoothed({x: [1], y: [3], low: null, high: null}, 0).y", [3]),
    (f"pointsOf({RUN_IN_PAGE}, 'acc', 'grpo')",
     {"x": [0, 2], "y": [0, 1], "low": [-1, 0], "high": [1, 2]}),
    (f"pointsOf({RUN_IN_PAGE}, 'acc', 'tokens').x", [0, 9]),
    (f"pointsOf({RUN_IN_PAGE}, 'warm_start/loss', 'step').y", [4, 2]),
    (f"pointsOf({RUN_IN_PAGE}, 'warm_start/loss', 'grpo').y", []),
    (f"pointsOf({RUN_IN_PAGE}, 'constructor', 'step').y", []),
    (f"pointsOf({RUN_IN_PAGE}, 'absent', 'step')", {"x": [], "y": [], "low": None, "high": None}),
    # Two seeds over time: they have no place in common, and overlap from 1 to 3.
    ("together([{x: [0, 2, 4], y: [0, 2, 4]}, {x: [1, 3], y: [3, 5]}])",
     {"x": [1, 2, 3], "y": [2, 3, 4], "low": [1, 2, 3], "high": [3, 4, 5]}),
    ("together([{x: [], y: []}, {x: [1], y: [3], low: null, high: null}]).y", [3]),
    ("positive({x: [1, 2, 3], y: [-1, 0, 2], low: null, high: null}).x", [3]),
    ("extent([{x: [1, 2, 9], y: [1, 5, 99], low: [0, 4, 0], high: [2, 6, 99]}], 0, 5, false)",
     [0, 6]),
    ("extent([{x: [1, 2], y: [1, 5], low: [0, -4], high: [2, 6]}], 0, 5, true)", [1, 6]),
    ("extent([], 0, 1, false)", None),
    ("logTicks(0.02, 3)", [0.02, 0.05, 0.1, 0.2, 0.5, 1, 2]),
    ("logTicks(1e-9, 1e5)", [1e-9, 1e-6, 1e-3, 1, 1e3]),
    ("logTicks(2, 7)", [2, 4, 6]),
    ("[3e-4, 0.1 * 0.003, 1234.5, 5e-7, 1e12, 12, null].map(x => number(x))",
     ["0.0003", "0.0003", "1,235", "5e-7", "1e12", "12", "-"]),
    ("['10', '', '9', 'b', 'a'].sort((a, b) => compared(a, b, 1))", ["9", "10", "a", "b", ""]),
    ("['10', '', '9'].sort((a, b) => compared(a, b, -1))", ["10", "9", ""]),
    ("[matches('run lr_3 seed 1', 'SEED lr_3'), matches('run', 'runs'), matches('run', '')]",
     [True, False, True]),
  ],
)  # fmt: skip
def test_the_arithmetic_of_the_page(expression, value):
  script = f"{(WEB / 'curves.js').read_text()}\nconsole.log(JSON.stringify({expression}))"
  done = subprocess.run([NODE, "-e", script], capture_output=True, text=True)
  assert not done.stderr
  found = json.loads(done.stdout)
  assert found == (
    pytest.approx(value) if isinstance(value, list) and value[:1] != [None] else value
  )


def test_the_settings_that_differ_from_defaults_and_between_runs(tmp_path):
  a = make_run(tmp_path / "a", rate=1e-3)
  b = make_run(tmp_path / "b", rate=1e-4, seed=3)
  assert runs.differences([a.settings, b.settings]) == ["optimizer.learning_rate"]
  changed = runs.changed(b)
  assert changed["seed"] == (3, 0) and changed["batch.group_size"][0] == 2
  assert "optimizer.schedule" not in changed
  assert (a.state, a.step, a.columns.newest("reward")) == ("step 0 of 4", 0, None)


def test_completions_are_evenly_chosen_and_groups_with_advantages_come_first(tmp_path):
  assert completions.evenly(list(range(0, 1000, 10)), 3) == [0, 500, 990]
  assert completions.evenly([4, 8], 3) == [4, 8]
  run = make_run(tmp_path / "a", saved=range(1, 40))
  shown = completions.shown_completions(run, completions.shares(1))
  assert len(shown["steps"]) == 12 and shown["steps"][-1]["step"] == 39
  assert shown["remarks"] == ["12 of 39 saved steps"]
  first, second = shown["steps"][0]["groups"]
  assert first["prompt"] == "3+4=" and second["prompt"] == "1+1="
  member = first["members"][0]
  assert (member["reward"], member["length"], member["scores"]) == (1.0, 6, {"strict": 1.0})
  assert "".join(member["tokens"]) == "#### 7" and len(member["logprobs"]) == 6
  assert [*member["extras"]] == ["read", "steps"] and member["extras"]["read"] == HOSTILE
  assert member["extras"]["steps"].startswith('["7", "7"') and len(member["extras"]["steps"]) == 301


def test_a_page_of_many_runs_has_fewer_completions_of_each(tmp_path):
  assert completions.shares(30).steps == 3 and completions.shares(30).tokens < 5000
  run = make_run(tmp_path / "a", saved=range(1, 9))
  shown = completions.shown_completions(run, completions.Share(steps=2, tokens=1))
  assert [len(step["groups"]) for step in shown["steps"]] == [1, 1]
  assert shown["remarks"] == [
    "2 of 8 saved steps",
    "1 of 2 groups of a step, those with advantages first",
  ]


def test_tokens_have_the_texts_that_they_add():
  tokens = tokenizer.load(ROOT / "tests/golden/tokenizers/llama2")
  ids = tokens.encode("Two pens, é and 北京!")
  assert "".join(completions.token_texts(ids, tokens.decode)).strip() == tokens.decode(ids).strip()


def test_a_tokenizer_that_is_gone_leaves_whole_texts(tmp_path):
  made = make_run(tmp_path / "a", saved=[1])
  data = dataclasses.replace(made.config.data, tokenizer=str(tmp_path / "gone"))
  made = dataclasses.replace(made, config=dataclasses.replace(made.config, data=data))
  shown = completions.shown_completions(made, completions.shares(1))
  assert "tokenizer cannot be read" in shown["remarks"][0]
  assert "tokens" not in shown["steps"][0]["groups"][0]["members"][0]


@pytest.mark.usefixtures("own_tables")
def test_tokens_of_a_task_that_a_plugin_registers_are_shown(tmp_path):
  plugin = tmp_path / "plugin.py"
  plugin.write_text(
    "import grpo_jax\n"
    "@grpo_jax.register_task\n"
    "def task_of_a_reported_run(path):\n"
    "  rows = [{'question': 'ab'}]\n"
    "  return grpo_jax.Task(rows, rows, 'ab')\n"
  )
  made = make_run(tmp_path / "a", saved=[1])
  changes = {"plugins": (str(plugin),), "data.task": "task_of_a_reported_run"}
  made = dataclasses.replace(made, config=made.config.replace(changes))
  shown = completions.shown_completions(made, completions.shares(1))
  assert shown["remarks"] == []
  assert "tokens" in shown["steps"][0]["groups"][0]["members"][0]


@pytest.mark.parametrize(
  "spoil, message",
  [
    (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read"),
    (lambda folder: (folder / "metrics.jsonl").write_text("x\n{}\n"), "metrics.jsonl"),
  ],
)
def test_a_folder_that_is_no_run_is_named(tmp_path, spoil, message):
  make_run(tmp_path / "a", rows_of(reward=[1.0]))
  spoil(tmp_path / "a")
  with pytest.raises(ConfigError, match=message):
    runs.read_run(str(tmp_path / "a"))


def test_a_folder_given_twice_is_refused_and_equal_names_become_paths(tmp_path):
  a, b = make_run(tmp_path / "x/a"), make_run(tmp_path / "y/a")
  assert [run.name for run in runs.with_unique_names([a, b])] == [str(a.folder), str(b.folder)]
  with pytest.raises(ConfigError, match="is given twice"):
    runs.with_unique_names([a, a])


def held(text, name):
  """The JSON that a page holds."""
  start = text.index(">", text.index(f'id="{name}"')) + 1
  return json.loads(text[start : text.index("</script>", start)])


def test_no_text_of_a_model_can_leave_its_place_in_the_page(tmp_path):
  name = "<b>run"
  made = make_run(tmp_path / name, rows_of(reward=[1.0, 2.0]), saved=[1, 2])
  data = dataclasses.replace(made.config.data, tokenizer=str(tmp_path / "gone"))
  made = dataclasses.replace(made, config=dataclasses.replace(made.config, data=data))
  text = page([made])
  assert HOSTILE not in text and "<img" not in text and "<b>run" not in text
  assert held(text, "data")["runs"][0]["name"] == name
  members = held(text, "completions")[0]["steps"][0]["groups"][0]["members"]
  assert members[0]["text"] == HOSTILE
  assert held(page([make_run(tmp_path / "empty")]), "data")["metrics"] == []


def report(*arguments):
  command = [sys.executable, "-m", "grpo_jax.report", *map(str, arguments)]
  return subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)


def test_a_page_has_the_turns_of_completions(start, tmp_path):
  make_run(tmp_path / "runs/a", [*rows_of(reward=[0.5])], saved=[1])
  out = tmp_path / "page.html"
  code, _, stderr = start("report", tmp_path / "runs", f"--out={out}")
  assert (code, stderr) == (0, "")
  (shown,) = held(out.read_text(), "completions")
  member = shown["steps"][0]["groups"][0]["members"][0]
  assert [(turn["role"], turn["start"], turn["end"]) for turn in member["turns"]] == [
    ("assistant", 0, 2),
    ("tool", 2, 4),
    ("assistant", 4, 6),
  ]
  assert [turn["reward"] for turn in member["turns"]] == [0.5, None, None]
  assert len(member["tokens"]) == 6


def test_a_report_shows_what_is_whole_of_a_hostile_folder_and_counts_the_rest(start, tmp_path):
  rows = [*rows_of(reward=[0.5, None, "good"], kl=[float("nan"), -1e308, [1]])]
  make_run(tmp_path / "runs/a", rows, saved=range(1, 7))
  good = next(completion_rows())
  hostile = [
    *({key: value for key, value in good.items() if key != gone} for gone in good),
    *(good | {key: value} for key in good for value in (None, "text", [None], {}, 1e999)),
    *([], None, 7, "row", {}),
  ]
  for step, lines in (
    (2, hostile),
    (4, [[]]),
    (5, []),
    (6, [good | {"completion_ids": [2**70] * 6}]),
  ):
    content = "".join(json.dumps(row) + "\n" for row in lines)
    (tmp_path / f"runs/a/completions/{step:06d}.jsonl").write_text(content)
  (tmp_path / "runs/a/completions/000003.jsonl").write_bytes(b"{\xff")
  out = tmp_path / "page.html"
  code, _, stderr = start("report", tmp_path / "runs", f"--out={out}")
  assert (code, stderr) == (0, "")
  text = out.read_text()
  (run,) = held(text, "data")["runs"]
  assert run["left_out"] == {"reward": 2, "kl": 2}
  (shown,) = held(text, "completions")
  assert [step["step"] for step in shown["steps"]] == [1, 2, 6]
  # Without prompt or completion, with another thing in their place, and the five last rows.
  assert f"step 2 without {2 + 2 * 4 + 5} rows that are not completions" in shown["remarks"]
  assert any("000003.jsonl cannot be read" in remark for remark in shown["remarks"])
  assert "text" in shown["steps"][-1]["groups"][0]["members"][0]  # no ids


@pytest.mark.slow
def test_one_run_has_the_whole_width_and_the_table_says_what_its_reward_is(tmp_path):
  """A legend of one run says nothing, and a mean is not the last row's value."""
  rows = [{"step": n + 1, "reward": n / 10, "kl": 0.1} for n in range(4)]
  one, two = (make_run(tmp_path / name, rows, seed) for seed, name in enumerate(("a", "b")))
  assert '<div id="curves" class="alone">' in page([one])
  text = page([one, two])
  assert '<div id="curves">' in text
  assert text.count('data-name="reward, mean of 10" data-value="0.15') == 2


def test_a_page_that_cannot_be_written_is_refused_before_the_work(tmp_path):
  # The run is damaged, too, and is not read.
  make_run(tmp_path / "a", rows_of(reward=[1.0]))
  (tmp_path / "a/metrics.jsonl").write_text("x\n{}\n")
  done = report(tmp_path / "a", f"--out={tmp_path}/missing/page.html")
  assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
  assert f"no file can be written in {tmp_path}/missing (No such file or directory)" in done.stderr


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
  "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run"
  " --disable-background-networking --disable-component-update --disable-sync"
  " --enable-logging=stderr --allow-file-access-from-files --dump-dom"
).split()
# Opens the page in a frame and writes how long that took.
CLOCK = """<iframe src="page.html"></iframe><p id="seconds"></p><script>
const start = performance.now();
document.querySelector("iframe").onload = () => {
  document.getElementById("seconds").textContent = (performance.now() - start) / 1000;
};
</script>"""


# Does things to the page in a frame of some width, and writes what it then sees.
USER = """<iframe src="page.html" style="width: WIDTHpx; height: 18000px; border: 0"></iframe>
<p id="seen"></p><script>
const frame = document.querySelector("iframe"), seen = {};
frame.onload = async () => {
  const page = frame.contentDocument, at = id => page.getElementById(id);
  const all = query => [...page.querySelectorAll(query)];
  const isDrawn = figure =>
    figure.querySelector(".plot").plot || figure.querySelector(".note").textContent;
  const pause = async () => {
    do await new Promise(done => setTimeout(done, 300)); while (!all("figure").every(isDrawn));
  };
  const set = async (id, value, event) => {
    at(id)[typeof value === "boolean" ? "checked" : "value"] = value;
    at(id)["on" + event]();
    await pause();
  };
  const click = async element => { element.click(); await pause(); };
  const rows = () => all("#runs tbody tr").filter(row => !row.hidden);
  const look = name => seen[name] = {
    sideways: page.documentElement.scrollWidth - page.documentElement.clientWidth,
    accuracies: rows().map(row => row.cells[3].innerText),
    legend: all("#legend label").map(label => label.innerText.trim()),
    cut: all("#legend label, td, figcaption").filter(e => e.scrollWidth > e.clientWidth + 1).length,
    curves: all(".plot").map(box => box.plot ? box.plot.series.length - 1 : 0),
    heights: all(".u-over").map(plot => plot.clientHeight),
    first: all(".plot").map(box => box.plot ? box.plot.data[1] : [])[1],
    from: all(".plot").map(box => box.plot ? box.plot.scales.x.min : null)[1],
    notes: all(".note").map(note => note.textContent),
    dark: frame.contentWindow.getComputedStyle(page.body).backgroundColor,
  };
  await pause();
  look("start");
  await click(all("#legend input")[0]);
  look("without the first");
  await click(all("[data-show=all]")[0]);
  await set("filter", "kl_coef 0.04", "input");
  look("filtered");
  await set("filter", "", "input");
  await click(all("[data-column='3']")[0]);
  await click(all("[data-column='3']")[0]);
  look("sorted");
  await set("smooth", 0.5, "input");
  look("smooth");
  await set("smooth", 0, "input");
  await set("together", false, "change");
  look("apart");
  await set("axis", "grpo", "change");
  look("grpo");
  await set("axis", "hours", "change");
  await set("log", true, "change");
  look("log");
  await click(all("[data-choose=all]")[0]);
  await click(at("theme"));
  look("all");
  document.getElementById("seen").textContent = JSON.stringify(seen);
};
</script>"""


USER_FLAGS = ("--virtual-time-budget=200000", "--window-size=2000,18500")  # all is in view


def browse(path, profile, *flags):
  """What the browser makes of a page, and what it says on its console."""
  command = [CHROMIUM, *FLAGS, *flags, f"--user-data-dir={profile}", path.as_uri()]
  done = subprocess.run(command, capture_output=True, text=True, timeout=120)
  return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="needs chromium")
def test_a_browser_shows_runs_of_5000_steps_within_two_seconds(tmp_path):
  values = np.random.default_rng(0).random(5000).tolist()
  names = ("reward", "kl", "entropy", "grad_norm", "completions__mean_length", "eval__accuracy")
  for seed in (0, 1):
    rows = rows_of(**dict.fromkeys(names, values))
    make_run(tmp_path / f"seed{seed}", rows, seed=seed, steps=5000, saved=range(50, 5001, 50))
  out = tmp_path / "page.html"
  done = report(tmp_path, f"--out={out}")
  assert done.returncode == 0, done.stderr
  assert "2 runs" in done.stdout
  dom, console = browse(out, tmp_path / "profile")
  assert not console
  for text in ("finished, 5,000 steps", "KL to the reference", "12 of 100 saved steps"):
    assert text in dom
  # The first group shown is the one with advantages. The browser has its text as text.
  assert "reward 1" in dom and "advantage -1" in dom and "<img" not in dom
  (tmp_path / "clock.html").write_text(CLOCK)
  dom, _ = browse(tmp_path / "clock.html", tmp_path / "profile")
  seconds = float(dom.split('id="seconds">')[1].split("<")[0])
  print(f"opened in {seconds:.2f} s, {out.stat().st_size / 1e6:.1f} MB")
  assert seconds < 2


@pytest.fixture(scope="module")
def thirty_runs(tmp_path_factory):
  """A page of 15 settings with two seeds each, and the folder that has it."""
  folder = tmp_path_factory.mktemp("thirty")
  script = [sys.executable, ROOT / "experiments/report_runs.py", folder / "runs", "--steps=200"]
  subprocess.run(script, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
  done = report(folder / "runs", f"--out={folder}/page.html")
  assert done.returncode == 0, done.stderr
  return folder


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="needs chromium")
@pytest.mark.parametrize("width", [400, 1200, 1920])
def test_one_legend_switches_filters_and_sorts_thirty_runs_in_all_figures(thirty_runs, width):
  user = thirty_runs / f"user{width}.html"
  user.write_text(USER.replace("WIDTH", str(width)))
  dom, console = browse(user, thirty_runs / f"profile{width}", *USER_FLAGS)
  assert not console
  seen = json.loads(html.unescape(dom.split('id="seen">')[1].split("<")[0]))
  start = seen["start"]
  assert all(view["sideways"] == 0 for view in seen.values())
  assert all(view["cut"] == 0 for view in seen.values())  # labels are whole
  assert all(height > 150 for view in seen.values() for height in view["heights"])
  assert (
    start["curves"] == [15] * 10 and len(start["legend"]) == 15 and len(start["accuracies"]) == 30
  )
  assert start["legend"][0] == "kl_coef 0.01, learning_rate 0.0001 (2 seeds)"
  assert seen["without the first"]["curves"] == [14] * 10
  filtered = seen["filtered"]
  assert len(filtered["accuracies"]) == 10 and filtered["curves"] == [5] * 10
  assert all("kl_coef 0.04" in label for label in filtered["legend"])
  accuracies = [float(text.split("%")[0]) for text in seen["sorted"]["accuracies"]]
  assert accuracies == sorted(accuracies, reverse=True) and accuracies[0] > accuracies[-1]
  raw, smooth = seen["sorted"]["first"], seen["smooth"]["first"]
  assert smooth[1] == pytest.approx((raw[0] * 0.25 + raw[1] * 0.5) / 0.75)
  assert seen["apart"]["curves"] == [30] * 10 and seen["apart"]["from"] == 101
  assert seen["grpo"]["from"] == 1 and seen["grpo"]["curves"] == [30] * 9 + [0]
  assert seen["grpo"]["notes"][-1] == "no values to show over this axis"
  assert any("left out of the log scale" in note for note in seen["log"]["notes"])
  assert len(seen["all"]["curves"]) > 40 and seen["all"]["dark"] != start["dark"]
