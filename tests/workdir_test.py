"""A run's folder: its config, its rows and completions, also after a kill at any moment."""

import copy
import json
import os
import struct

from hypothesis import given, settings
from hypothesis import strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.settings import ConfigError
from grpo_jax.storage.reading import read_metrics
from grpo_jax.storage.row_writer import RowWriter
from grpo_jax.storage.workdir import open_run

CONFIG = {
  "seed": 0,
  "steps": 100,
  "compilation_cache": "auto",
  "model": {"path": "", "embed_dim": 64},
  "reward": {"functions": ("strict", "format"), "weights": (1.0, 0.5)},
  "optimizer": {"learning_rate": 1e-6, "schedule": "constant"},
  "eval": {"every": 10},
  "checkpoint": {"every": 5, "keep": 3},
  "log": {"every": 1},
}


def changed(key, value, config=CONFIG):
  out = copy.deepcopy(config)
  *sections, last = key.split(".")
  place = out
  for section in sections:
    place = place[section]
  place[last] = value
  return out


def begin(workdir, config):
  """Starts a run and writes its first row."""
  open_run(workdir, config)
  (workdir / "metrics.jsonl").write_text('{"step": 0}\n')


def test_a_new_run_stores_its_config(tmp_path):
  open_run(tmp_path / "a" / "run", CONFIG)
  stored = json.loads((tmp_path / "a" / "run" / "config.json").read_text())
  assert stored == changed("reward", {"functions": ["strict", "format"], "weights": [1.0, 0.5]})
  open_run(tmp_path / "a" / "run", CONFIG)  # again, as after a kill
  assert os.listdir(tmp_path / "a" / "run") == ["config.json"]


@pytest.mark.parametrize(
  "key, value",
  [
    ("steps", 200),
    ("compilation_cache", ""),
    ("eval.every", 0),
    ("checkpoint.every", 7),
    ("checkpoint.keep", 1),
    ("log.every", 2),
    ("eval", {"every": 10, "batch": 4}),
  ],
)
def test_keys_that_do_not_change_the_computation_may_differ(tmp_path, key, value):
  begin(tmp_path, CONFIG)
  open_run(tmp_path, changed(key, value))
  stored = json.loads((tmp_path / "config.json").read_text())
  for part in key.split("."):
    stored = stored[part]
  assert stored == value


def test_a_run_may_say_later_how_its_model_writes_calls(tmp_path):
  """A chat template whose calls are not read is refused, also under a run that began before."""
  config = changed("environment", {"calls": "auto"})
  begin(tmp_path, config)
  open_run(tmp_path, changed("environment.calls", "hermes", config))
  for calls in ("llama3", "auto"):
    with pytest.raises(ConfigError, match="environment.calls = 'hermes', this run"):
      open_run(tmp_path, changed("environment.calls", calls, config))


@pytest.mark.parametrize(
  "key, value, message",
  [
    ("seed", 1, "seed = 0, this run 1: name another --workdir, or keep the old value"),
    ("optimizer.learning_rate", 1e-5, "optimizer.learning_rate = 1e-06, this run 1e-05"),
    ("optimizer.schedule", "cosine", "optimizer.schedule = 'constant', this run 'cosine'"),
    ("model.path", "gpt", "model.path = '', this run 'gpt'"),
    ("reward.weights", (1.0, 1.0), r"reward.weights = \[1.0, 0.5\], this run \[1.0, 1.0\]"),
    ("model", {"path": ""}, "model.embed_dim = 64, this run no such key"),
    ("model.heads", 4, "model.heads = no such key, this run 4"),
  ],
)
def test_another_config_is_refused_and_the_old_one_stays(tmp_path, key, value, message):
  begin(tmp_path, CONFIG)
  before = (tmp_path / "config.json").read_bytes()
  with pytest.raises(ConfigError, match=message):
    open_run(tmp_path, changed(key, value))
  assert (tmp_path / "config.json").read_bytes() == before


def test_steps_may_not_differ_where_the_temperature_depends_on_them(tmp_path):
  """A config from before the temperature schedule has none, so it is constant."""
  before = CONFIG | {"sampling": {"temperature": 1.0}}
  config = changed("sampling.temperature_schedule", "linear", before)
  begin(tmp_path / "scheduled", config)
  message = "steps = 100, this run 200: with sampling.temperature_schedule = 'linear'"
  with pytest.raises(ConfigError, match=message):
    open_run(tmp_path / "scheduled", changed("steps", 200, config))
  begin(tmp_path / "older", before)
  open_run(tmp_path / "older", changed("steps", 200, before))


def test_steps_may_not_differ_where_the_entropy_bonus_depends_on_them(tmp_path):
  config = changed("algo.entropy_coef_end", 0.0, CONFIG | {"algo": {"entropy_coef": 0.1}})
  begin(tmp_path, config)
  message = "steps = 100, this run 200: with algo.entropy_coef_end = 0.0"
  with pytest.raises(ConfigError, match=message):
    open_run(tmp_path, changed("steps", 200, config))


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_steps_may_not_differ_where_the_learning_rate_depends_on_them(tmp_path, schedule):
  config = changed("optimizer.schedule", schedule)
  begin(tmp_path, config)
  # Also where the new schedule is constant: the steps so far were taken with the old one.
  for longer in (changed("steps", 200, config), changed("steps", 200)):
    with pytest.raises(ConfigError) as error:
      open_run(tmp_path, longer)
    said = str(error.value)
    assert f"steps = 100, this run 200: with optimizer.schedule = '{schedule}'" in said
    assert f"grpo_jax.export --workdir={tmp_path} --out=FOLDER" in said and "model.path" in said


def test_a_run_that_failed_before_its_first_row_may_get_another_config(tmp_path):
  open_run(tmp_path, CONFIG)
  open_run(tmp_path, changed("model.path", "corrected"))
  assert json.loads((tmp_path / "config.json").read_text())["model"]["path"] == "corrected"


def complete(config):
  """Adds the keys that a config.json lacks, with the values of the time before they existed."""
  before = changed("optimizer.schedule", "linear", changed("model.embed_dim", 32))
  completed = copy.deepcopy(dict(config))
  for key, value in before.items():
    if isinstance(value, dict):
      completed[key] = {**value, **completed.get(key, {})}
    else:
      completed.setdefault(key, value)
  return completed


@pytest.mark.parametrize(
  "completing, message",
  [(None, "has seed = no such key, this run 0"), (complete, "has model.embed_dim = 32, this run")],
)
def test_a_config_of_something_else_is_refused(tmp_path, completing, message):
  (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
  with pytest.raises(ConfigError, match=message):
    open_run(tmp_path, CONFIG, completing)
  assert (tmp_path / "config.json").read_text() == '{"model_type": "qwen2"}'


def test_a_config_of_something_else_with_equal_values_is_refused_by_its_own_key(tmp_path):
  (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
  message = "has model_type = 'qwen2', this run no such key"
  with pytest.raises(ConfigError, match=message):
    open_run(tmp_path, complete({}), complete)


def without(key, config=CONFIG):
  out = copy.deepcopy(config)
  *sections, last = key.split(".")
  place = out
  for section in sections:
    place = place[section]
  del place[last]
  return out


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("key", ["model.embed_dim", "reward.weights", "model", "seed"])
def test_a_config_that_lacks_a_newer_key_continues_with_the_old_behaviour(tmp_path, key, begun):
  old = without(key)
  config = complete(old)  # its tuples are lists in the file
  (begin if begun else open_run)(tmp_path, old)
  open_run(tmp_path, config, complete)
  assert json.loads((tmp_path / "config.json").read_text()) == json.loads(json.dumps(config))
  open_run(tmp_path, config)


@pytest.mark.parametrize(
  "key, message",
  [
    ("model.embed_dim", "model.embed_dim = 32, this run 64: name another --workdir, or keep"),
    ("optimizer.schedule", "optimizer.schedule = 'linear', this run 'constant': name another"),
    ("model", "model.embed_dim = 32, this run 64: name another --workdir"),
  ],
)
def test_a_newer_key_with_another_value_than_the_old_behaviour_is_refused(tmp_path, key, message):
  begin(tmp_path, without(key))
  before = (tmp_path / "config.json").read_bytes()
  with pytest.raises(ConfigError, match=message) as error:
    open_run(tmp_path, CONFIG, complete)
  assert "\n" not in str(error.value)
  assert (tmp_path / "config.json").read_bytes() == before


def test_a_key_that_no_longer_exists_is_refused(tmp_path):
  begin(tmp_path, changed("model.heads", 4))
  with pytest.raises(ConfigError, match="model.heads = 4, this run no such key"):
    open_run(tmp_path, CONFIG, complete)


def test_folders_of_other_things_are_refused(tmp_path):
  (tmp_path / "thesis.tex").write_text("x")
  with pytest.raises(ConfigError, match="is not empty and has no config.json"):
    open_run(tmp_path, CONFIG)
  with pytest.raises(ConfigError, match="thesis.tex cannot be created"):
    open_run(tmp_path / "thesis.tex", CONFIG)
  with pytest.raises(ConfigError, match="xxx: File name too long"):
    open_run(tmp_path / ("x" * 300), CONFIG)
  assert os.listdir(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize("content", [b"", b'{"seed": ', b"\xff\xfe", b"[1]"])
def test_unreadable_config_is_refused(tmp_path, content):
  (tmp_path / "config.json").write_bytes(content)
  with pytest.raises(ConfigError, match="config.json .*name another --workdir"):
    open_run(tmp_path, CONFIG)


def test_killed_while_the_first_config_was_written(tmp_path):
  (tmp_path / "config.json.new").write_text('{"se')
  open_run(tmp_path, CONFIG)
  assert os.listdir(tmp_path) == ["config.json"]


def write_rows(workdir, start_step, last):
  writer = RowWriter(workdir, start_step, tensorboard=False)
  for step in range(start_step + 1, last + 1):
    writer.write(step, {"reward": step / 7, "kl": 0.1 * step})
  writer.close()


def test_rows_are_strict_json_with_step_first_and_order_kept(tmp_path):
  writer = RowWriter(tmp_path, -1, tensorboard=False)
  values = {
    "z": 0.1,
    "a": 3,
    "nan": float("nan"),
    "inf": -np.inf,
    "f32": np.float32(0.1),
    "jax": jnp.float32(0.5),
  }
  writer.write(0, values)
  line = (tmp_path / "metrics.jsonl").read_text()  # before close: a kill now would not lose it
  assert line == (
    '{"step": 0, "z": 0.1, "a": 3, "nan": null, "inf": null, "f32": 0.10000000149011612, '
    '"jax": 0.5}\n'
  )
  writer.close()
  assert read_metrics(tmp_path) == [json.loads(line)]


def test_a_step_is_written_once(tmp_path):
  writer = RowWriter(tmp_path, -1, tensorboard=False)
  writer.write(4, {})
  for step in (4, 3):
    with pytest.raises(ValueError, match=f"step {step} is not later than step 4"):
      writer.write(step, {})
  writer.close()
  again = RowWriter(tmp_path, 4, tensorboard=False)
  with pytest.raises(ValueError, match="step 4 is not later"):
    again.write(4, {})
  again.write(5, {})
  assert [row["step"] for row in read_metrics(tmp_path)] == [4, 5]


@given(st.data())
@settings(max_examples=60)
def test_killed_at_any_byte_and_resumed_equals_never_killed(tmp_path_factory, data):
  folder = tmp_path_factory.mktemp("run")
  write_rows(folder, -1, 6)
  whole = (folder / "metrics.jsonl").read_bytes()
  cut = data.draw(st.integers(0, len(whole)))
  # The last step whose row is there. No checkpoint is of a later one.
  done = whole[:cut].count(b"\n") - 1
  (folder / "metrics.jsonl").write_bytes(whole[:cut])
  write_rows(folder, data.draw(st.integers(-1, done)), 6)
  assert (folder / "metrics.jsonl").read_bytes() == whole


def test_half_a_last_line_is_dropped_and_a_broken_middle_is_an_error(tmp_path):
  write_rows(tmp_path, -1, 2)
  path = tmp_path / "metrics.jsonl"
  path.write_bytes(path.read_bytes() + b'{"step": 3, "rew')
  assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2]
  RowWriter(tmp_path, 2, tensorboard=False).close()
  assert path.read_bytes().count(b"\n") == 3 and path.read_bytes().endswith(b"}\n")
  lines = path.read_bytes().split(b"\n")
  path.write_bytes(b"\n".join([lines[0], b"\x00\x00", *lines[2:]]))
  message = "metrics.jsonl line 2 is not a row of metrics"
  with pytest.raises(ConfigError, match=message):
    read_metrics(tmp_path)
  with pytest.raises(ConfigError, match=message):
    RowWriter(tmp_path, 2, tensorboard=False)
  with pytest.raises(ConfigError, match="nowhere/metrics.jsonl does not exist"):
    read_metrics(tmp_path / "nowhere")


def test_completions_keep_any_text_and_a_resume_removes_later_ones(tmp_path):
  rows = [
    {
      "prompt": "2+2\n",
      "completion": "\ud83d ü日\u2028\x1b\x00",
      "reward": float("nan"),
      "length": np.int32(3),
    }
  ]
  writer = RowWriter(tmp_path, -1, tensorboard=False)
  for step in (5, 10, 1000000):
    writer.completions(step, rows)
  writer.close()
  folder = tmp_path / "completions"
  assert sorted(os.listdir(folder)) == ["000005.jsonl", "000010.jsonl", "1000000.jsonl"]
  (line,) = (folder / "000005.jsonl").read_bytes().decode("utf-8").split("\n")[:-1]
  assert json.loads(line) == {**rows[0], "reward": None, "length": 3}
  assert "ü日" in line
  (folder / "000006.jsonl.new").write_text("{")  # a kill left it half written
  (folder / "notes.txt").write_text("the user's own")
  RowWriter(tmp_path, 9, tensorboard=False).close()
  assert sorted(os.listdir(folder)) == ["000005.jsonl", "notes.txt"]


def events(folder):
  """The events in all of TensorBoard's files, in the order of the files' suffixes."""
  from tensorboardX.proto import event_pb2

  out = []
  paths = folder.glob("events.out.tfevents.*")
  for path in sorted(paths, key=lambda path: path.name.rsplit(".", 1)[-1]):
    content, position = path.read_bytes(), 0
    while position < len(content):
      (length,) = struct.unpack_from("<Q", content, position)
      start = position + 12
      out.append(event_pb2.Event.FromString(content[start : start + length]))
      position += length + 16
  return out


def test_tensorboard_gets_the_rows_and_forgets_those_that_run_again(tmp_path):
  for start in (-1, 1):
    writer = RowWriter(tmp_path, start, tensorboard=True)
    for step in range(start + 1, 4):
      writer.write(step, {"reward": step / 2, "kl": float("nan")})
    writer.close()
  visible = {}
  for event in events(tmp_path):
    # At a new start, TensorBoard drops what it has from this step on.
    if event.session_log.status == event.session_log.START:
      visible = {step: value for step, value in visible.items() if step < event.step}
    for value in event.summary.value:
      assert value.tag == "reward" and event.step not in visible
      visible[event.step] = value.simple_value
  assert visible == {0: 0.0, 1: 0.5, 2: 1.0, 3: 1.5}
  assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 2


ROWS = [
  {
    "prompt": "1+1=",
    "completion": "<b>2</b> *|*\nend",
    "reward": 1.0,
    "advantage": -0.5,
    "length": 3,
    "rewards/strict": None,
    "completion_ids": [1, 2],
  }
]


def test_tensorboard_gets_completions_as_text_that_is_not_markup(tmp_path):
  open_run(tmp_path, CONFIG)
  writer = RowWriter(tmp_path, -1, tensorboard=True)
  writer.completions(2, ROWS)
  writer.close()
  (found,) = [(e.step, v) for e in events(tmp_path) for v in e.summary.value]
  step, value = found
  assert (step, value.tag) == (2, "completions")
  assert value.metadata.plugin_data.plugin_name == "text"
  assert value.tensor.string_val[0].decode().splitlines() == [
    "| prompt | completion | reward | advantage | length | rewards/strict |",
    "|---|---|---|---|---|---|",
    "| 1&#43;1= | &lt;b&gt;2&lt;/b&gt; &#42;&#124;&#42;<br>end | 1 | -0.5 | 3 | - |",
  ]


def test_without_checkpoints_the_run_starts_over_and_keeps_what_was_there(tmp_path):
  """As when a user has removed checkpoints/, or a kill came before the first one."""
  warnings = []
  for first in ("a", "b"):
    writer = RowWriter(tmp_path, -1, tensorboard=False, warn=warnings.append)
    writer.write(1, {first: 1.0})
    writer.completions(1, [{"completion": first}])
    writer.close()
  RowWriter(tmp_path, -1, tensorboard=False, warn=warnings.append).close()
  for number, first in enumerate(("a", "b"), 1):
    rows = (tmp_path / f"metrics.jsonl.{number}").read_text()
    assert rows == f'{{"step": 1, "{first}": 1.0}}\n'
    completions = (tmp_path / f"completions.{number}" / "000001.jsonl").read_text()
    assert completions == f'{{"completion": "{first}"}}\n'
    assert f"{tmp_path} has no checkpoint: starting over" in warnings[number - 1]
    assert f"completions.{number} and metrics.jsonl.{number}" in warnings[number - 1]
  assert read_metrics(tmp_path) == [] and not (tmp_path / "completions").exists()
  assert len(warnings) == 2
  RowWriter(tmp_path, -1, tensorboard=False, warn=warnings.append).close()
  assert len(warnings) == 2 and not (tmp_path / "metrics.jsonl.3").exists()


@pytest.mark.parametrize(
  "steps, start, every, missing",
  [
    ([1, 2, 3], 3, 1, None),
    ([1, 2, 3], 2, 1, None),
    ([], -1, 1, None),
    ([5], 9, 5, None),  # a row every five steps
    ([1, 2, 3], 8, 1, "metrics.jsonl ends at step 3 and the checkpoint is of step 8"),
    ([], 4, 1, "metrics.jsonl ends at step 0 and the checkpoint is of step 4"),
  ],
)
def test_missing_rows_are_mentioned(tmp_path, steps, start, every, missing):
  (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in steps))
  warnings = []
  writer = RowWriter(tmp_path, start, tensorboard=False, warn=warnings.append)
  writer.warn_of_missing_rows(start, every)
  assert len(warnings) == bool(missing) and (not missing or missing in warnings[0])


def raise_interrupt(*_):
  raise KeyboardInterrupt


def test_files_are_replaced_in_one_step(tmp_path, monkeypatch):
  open_run(tmp_path, CONFIG)
  before = (tmp_path / "config.json").read_bytes()
  monkeypatch.setattr(os, "replace", raise_interrupt)
  with pytest.raises(KeyboardInterrupt):
    open_run(tmp_path, changed("steps", 200))
  assert (tmp_path / "config.json").read_bytes() == before


@pytest.mark.parametrize(
  "rows, number",
  [
    (b'{"step": 1}\n{"step": 1}\n', 2),
    (b'{"step": 2}\n{"step": 1}\n', 2),
    (b"[" * 100_000 + b"\n", 1),
  ],
)
def test_rows_that_are_no_later_steps_are_refused_before_anything_is_written(
  tmp_path, rows, number
):
  open_run(tmp_path, CONFIG)
  (tmp_path / "metrics.jsonl").write_bytes(rows)
  before = (tmp_path / "config.json").stat().st_mtime_ns
  with pytest.raises(ConfigError, match=f"metrics.jsonl line {number} is not a row of metrics"):
    open_run(tmp_path, CONFIG)
  assert (tmp_path / "config.json").stat().st_mtime_ns == before


def test_what_is_no_file_or_no_folder_is_refused(tmp_path):
  open_run(tmp_path, CONFIG)
  (tmp_path / "completions").write_bytes(b"")
  with pytest.raises(ConfigError, match="completions is not a folder: move it away"):
    open_run(tmp_path, CONFIG)
  (tmp_path / "completions").unlink()
  os.mkfifo(tmp_path / "metrics.jsonl")
  with pytest.raises(ConfigError, match="metrics.jsonl cannot be read .*pipe or a device"):
    open_run(tmp_path, CONFIG)
