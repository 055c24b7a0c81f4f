"""The report: how runs are grouped, thinned and compared, and that the page shows them as text."""

import dataclasses
import json
import os
from pathlib import Path
import shutil
import subprocess
import sys

import numpy as np
import pytest

from grpo_jax.config import Config, Log, Optimizer, to_dict
from grpo_jax.data.tokenizers import tokenizer
from grpo_jax.reporting import completions, curves, runs
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
    }


def rows_of(**values):
  """Rows of metrics of steps 1, 2, ... with these values."""
  count = len(next(iter(values.values())))
  return [
    {"step": i + 1} | {name.replace("__", "/"): column[i] for name, column in values.items()}
    for i in range(count)
  ]


def test_runs_that_differ_in_their_seeds_alone_are_one_curve_with_a_band(tmp_path):
  made = [
    make_run(tmp_path / "a0", rows_of(reward=[1.0, 2.0, 3.0]), seed=0),
    make_run(tmp_path / "a1", rows_of(reward=[3.0, 2.0]), seed=1),
    make_run(tmp_path / "b0", rows_of(reward=[5.0, 5.0]), rate=1e-4),
  ]
  a, b = runs.group(made)
  assert [run.name for run in a.runs] == ["a0", "a1"] and [run.name for run in b.runs] == ["b0"]
  assert a.label == "learning_rate 0.001 (2 seeds)" and b.label == "learning_rate 0.0001"
  found = curves.curve(a, "reward")
  assert found.steps.tolist() == [1, 2]  # the steps of both
  assert found.values.tolist() == [2, 2]
  assert found.low.tolist() == [1, 2] and found.high.tolist() == [3, 2]
  assert curves.curve(b, "reward").low is None and curves.curve(b, "kl") is None


def test_one_run_has_the_interval_of_its_metric_as_its_band(tmp_path):
  rows = rows_of(reward=[0.0, 0.0, 0.0])
  for i, value in ((0, 0.5), (2, 0.75)):
    rows[i] |= {"eval/accuracy": value, "eval/accuracy_low": value - 0.1}
    rows[i] |= {"eval/accuracy_high": value + 0.1}
  (series,) = runs.group([make_run(tmp_path / "a", rows)])
  found = curves.curve(series, "eval/accuracy")
  assert found.steps.tolist() == [1, 3] and found.values.tolist() == [0.5, 0.75]
  np.testing.assert_allclose(found.high - found.values, 0.1)
  np.testing.assert_allclose(found.values - found.low, 0.1)


def test_long_curves_are_means_of_neighbours_and_their_bands_hold_all():
  steps = np.arange(1, 11, dtype=float)
  full = curves.Curve(steps, steps**2, steps**2 - 1, steps**2 + 1)
  thin = curves.thinned(full, most=5)
  assert thin.steps.tolist() == [1.5, 3.5, 5.5, 7.5, 9.5]
  assert thin.values.tolist() == [2.5, 12.5, 30.5, 56.5, 90.5]
  assert thin.low.tolist() == [0, 8, 24, 48, 80] and thin.high.tolist() == [5, 17, 37, 65, 101]
  uneven = curves.thinned(curves.Curve(steps, steps), most=3)
  assert uneven.values.tolist() == [2, 5, 8.5]
  assert curves.thinned(full, most=10) is full


def test_the_time_of_a_step_is_the_median_and_what_no_part_explains(tmp_path):
  rows = rows_of(
    time__sample=[90.0, 1.0, 2.0], time__update=[90.0, 3.0, 4.0], time__step=[200.0, 7.0, 8.0]
  )
  (series,) = runs.group([make_run(tmp_path / "a", rows)])
  assert curves.step_seconds(series) == {
    "sample": 2.0,
    "reward": 0.0,
    "reference": 0.0,
    "update": 4.0,
    "other": 2.0,
  }


def test_the_settings_that_differ_from_defaults_and_between_runs(tmp_path):
  a = make_run(tmp_path / "a", rate=1e-3)
  b = make_run(tmp_path / "b", rate=1e-4, seed=3)
  assert runs.differences([a.settings, b.settings]) == ["optimizer.learning_rate"]
  changed = runs.changed(b)
  assert changed["seed"] == (3, 0) and changed["batch.group_size"][0] == 2
  assert "optimizer.schedule" not in changed
  assert (a.state, a.step, a.newest("reward")) == ("step 0 of 4", 0, None)


def test_completions_are_evenly_chosen_and_groups_with_advantages_come_first(tmp_path):
  assert completions.evenly(list(range(0, 1000, 10)), 3) == [0, 500, 990]
  assert completions.evenly([4, 8], 3) == [4, 8]
  shown = completions.shown_completions(make_run(tmp_path / "a", saved=range(1, 40)))
  assert len(shown["steps"]) == completions.MOST_STEPS and shown["steps"][-1]["step"] == 39
  assert shown["remarks"] == ["12 of 39 saved steps"]
  first, second = shown["steps"][0]["groups"]
  assert first["prompt"] == "3+4=" and second["prompt"] == "1+1="
  member = first["members"][0]
  assert member["text"] == HOSTILE and member["scores"] == {"strict": 1.0}
  assert "".join(member["tokens"]) == "#### 7" and len(member["logprobs"]) == 6


def test_tokens_have_the_texts_that_they_add():
  tokens = tokenizer.load(ROOT / "tests/golden/tokenizers/llama2")
  ids = tokens.encode("Two pens, é and 北京!")
  assert "".join(completions.token_texts(ids, tokens.decode)).strip() == tokens.decode(ids).strip()


def test_a_tokenizer_that_is_gone_leaves_whole_texts(tmp_path):
  made = make_run(tmp_path / "a", saved=[1])
  data = dataclasses.replace(made.config.data, tokenizer=str(tmp_path / "gone"))
  made = dataclasses.replace(made, config=dataclasses.replace(made.config, data=data))
  shown = completions.shown_completions(made)
  assert "tokenizer cannot be read" in shown["remarks"][0]
  assert "tokens" not in shown["steps"][0]["groups"][0]["members"][0]


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


def test_no_text_of_a_model_can_leave_its_place_in_the_page(tmp_path):
  pytest.importorskip("bokeh")
  from grpo_jax.reporting.page import page

  made = make_run(tmp_path / "<b>run", rows_of(reward=[1.0, 2.0]), saved=[1, 2])
  text = page([made])
  assert HOSTILE not in text and "<img" not in text and "<b>run" not in text
  start = text.index(">", text.index('id="completions"')) + 1
  held = json.loads(text[start : text.index("</script>", start)])
  assert held[0]["steps"][0]["groups"][0]["members"][0]["text"] == HOSTILE
  assert "There are no metrics yet" in page([make_run(tmp_path / "empty")])


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


def browse(path, profile):
  """What the browser makes of a page, and what it says on its console."""
  command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", path.as_uri()]
  done = subprocess.run(command, capture_output=True, text=True, timeout=120)
  console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
  return done.stdout, [line for line in console if '"[bokeh ' not in line]  # how long it took


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="needs chromium")
def test_a_browser_shows_runs_of_5000_steps_within_two_seconds(tmp_path):
  pytest.importorskip("bokeh")
  values = np.random.default_rng(0).random(5000).tolist()
  names = ("reward", "kl", "entropy", "grad_norm", "completions__mean_length", "eval__accuracy")
  for seed in (0, 1):
    rows = rows_of(**dict.fromkeys(names, values))
    make_run(tmp_path / f"seed{seed}", rows, seed=seed, steps=5000, saved=range(50, 5001, 50))
  out = tmp_path / "page.html"
  command = [sys.executable, "-m", "grpo_jax.report", f"{tmp_path}", f"--out={out}"]
  done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
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
