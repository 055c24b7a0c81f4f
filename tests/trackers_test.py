"""Trackers: they get the rows of metrics.jsonl, a resumed run continues, and none ends a run."""

import json
import os
from pathlib import Path
import sqlite3
import struct
import subprocess
import sys
import threading
import types

import pytest

import grpo_jax
from grpo_jax.config import TRACKERS as NAMES
from grpo_jax.config import Config, Log, to_dict
from grpo_jax.settings import ConfigError, check_ranges
from grpo_jax.storage.reading import read_metrics
from grpo_jax.storage.row_writer import RowWriter
from grpo_jax.storage.workdir import open_run
from grpo_jax.training import trackers
from grpo_jax.training.reporter import Reporter
from grpo_jax.training.trackers import TRACKERS, OpenTracker, Tracker
from tests.small_run import small_config, small_run

CONFIG = to_dict(Config())
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


def start(folder, name, start_step, warn=pytest.fail):
  """A writer that sends its rows to a tracker, as a start of a run after `start_step` has it."""
  open_run(folder, CONFIG)
  senders = trackers.open_all(Log(trackers=(name,), project="sums"), folder, warn)
  return RowWriter(folder, start_step, False, senders)


def two_starts(folder, name):
  """Rows of two starts of a run: steps 1 to 3, and 3 to 4 again after the checkpoint of step 2."""
  for first, last in ((1, 3), (3, 4)):
    writer = start(folder, name, first - 1 if first > 1 else -1)
    for step in range(first, last + 1):
      writer.completions(step, ROWS)
      writer.write(step, {"reward": step / 2, "eval/mean@4": 0.25, "kl": float("nan")})
    writer.close()


@pytest.fixture
def fake(monkeypatch):
  """A tracker that keeps what it gets, in the place of one of the names.

  Attributes:
    got: What it got, in order.
    fail: Called with each step, and may raise.
  """
  fake = types.SimpleNamespace(got=[], starts=[], fail=lambda step: None)

  def log(step, values):
    fake.fail(step)
    fake.got.append((step, values))

  def open_fake(start):
    print("welcome")
    fake.starts.append((start.project, start.name, start.config, start.identity()))
    return OpenTracker(log, lambda has_failed: fake.got.append("failed" if has_failed else "end"))

  monkeypatch.setitem(TRACKERS, "mlflow", Tracker(open_fake, "the moon needs no network"))
  return fake


def test_there_is_a_record_for_each_name():
  assert tuple(TRACKERS) == NAMES
  setup = (Path(trackers.__file__).parents[2] / "setup.py").read_text()
  assert all(f'"{name}": ["{name}' in setup for name in NAMES)


def test_a_name_that_is_none_is_refused():
  with pytest.raises(
    ConfigError, match=r"^config key log.trackers is \('comet',\): choose among 'wandb', 'mlflow'"
  ):
    check_ranges(Config(log=Log(trackers=("comet",))))


def test_a_tracker_that_is_not_installed_is_one_line(monkeypatch):
  for name in NAMES:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError) as error:
      trackers.check_installed(Log(trackers=(name,)))
    assert str(error.value) == (
      f"config key log.trackers names {name}, which is not installed: pip install -e '.[{name}]'"
    )
  trackers.check_installed(Log())


def test_a_run_names_what_is_not_installed_before_it_makes_its_folder(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "mlflow", None)
  config = small_config().replace({"log.trackers": ("mlflow",)})
  with pytest.raises(ConfigError, match="names mlflow, which is not installed"):
    grpo_jax.train(config, tmp_path / "run")
  assert not (tmp_path / "run").exists()


def test_a_run_opens_the_trackers_that_it_names(tmp_path, fake):
  config = small_config().replace({"log.trackers": ("mlflow",), "log.project": "sums"})
  open_run(tmp_path, to_dict(config))
  reporter = Reporter(small_run(config), None, tmp_path, pytest.fail)
  reporter.open(-1)
  reporter.step(1, None, {"reward": 1.0}, None)
  reporter.close()
  assert fake.got == [(1, {"reward": 1.0}), "end"]
  assert fake.starts[0][:2] == ("sums", tmp_path.name)


def test_it_gets_the_finite_numbers_of_the_rows_and_both_starts_are_one_run(tmp_path, fake, capsys):
  two_starts(tmp_path, "mlflow")
  row = {"eval/mean@4": 0.25}
  first = [(step, {"reward": step / 2, **row}) for step in (1, 2, 3)]
  second = [(step, {"reward": step / 2, **row}) for step in (3, 4)]
  assert fake.got == [*first, "end", *second, "end"]
  assert [step for step, _ in first[:2] + second] == [r["step"] for r in read_metrics(tmp_path)]
  assert fake.starts[0] == fake.starts[1]
  project, name, config, identity = fake.starts[0]
  assert (project, name, config) == ("sums", tmp_path.name, json.loads(json.dumps(CONFIG)))
  assert identity == (tmp_path / "mlflow_id").read_text() != ""
  assert capsys.readouterr().out == ""  # it may be for a program


def test_a_tracker_that_fails_says_so_once_and_the_rows_go_on(tmp_path, fake):
  warnings, has_failed = [], threading.Event()
  writer = start(tmp_path, "mlflow", -1, warnings.append)

  def fail(step):
    if step in (2, 3):
      raise SystemExit(f"no network\nat step {step}")
    if step == 4:
      has_failed.set()

  fake.fail = fail
  for step in range(1, 6):
    writer.write(step, {"reward": 1.0})
    assert step < 4 or has_failed.wait(60)
  writer.close()
  assert fake.got == [(1, {"reward": 1.0}), (4, {"reward": 1.0}), (5, {"reward": 1.0}), "end"]
  assert len(read_metrics(tmp_path)) == 5
  (warning,) = warnings
  assert warning == (
    "mlflow has failed, and may lack rows; the run goes on, and all of them are in metrics.jsonl:"
    " SystemExit: no network at step 2"
  )


def test_a_step_does_not_wait_for_a_tracker_nor_does_the_end_for_ever(tmp_path, fake, monkeypatch):
  monkeypatch.setattr(trackers.Sender, "patience", 0.2)
  warnings, goes_on = [], threading.Event()
  fake.fail = lambda step: goes_on.wait(60)
  writer = start(tmp_path, "mlflow", -1, warnings.append)
  for step in range(1, 4):
    writer.write(step, {"reward": 1.0})
  writer.close()
  assert fake.got == [] and len(read_metrics(tmp_path)) == 3
  (warning,) = warnings
  assert warning.startswith("mlflow has not taken all rows within 0 seconds")
  goes_on.set()


def test_rows_that_wait_for_a_tracker_are_bounded(tmp_path, fake, monkeypatch):
  monkeypatch.setattr(trackers.Sender, "most_waiting", 5)
  warnings, goes_on, begun = [], threading.Event(), threading.Event()

  def hang(step):
    begun.set()
    goes_on.wait(60)

  fake.fail = hang
  writer = start(tmp_path, "mlflow", -1, warnings.append)
  writer.write(1, {"reward": 1.0})
  assert begun.wait(60)
  for step in range(2, 10):  # 5 to 9 wait, and two of them make room for the end
    writer.write(step, {"reward": 1.0})
  assert warnings == [
    "mlflow takes no rows: 5 wait, and for each further one the oldest is dropped; all of them are"
    " in metrics.jsonl and completions/"
  ]
  threading.Timer(0.2, goes_on.set).start()
  writer.close()
  assert [step for step, _ in fake.got[:-1]] == [1, 7, 8, 9] and fake.got[-1] == "end"
  assert warnings[1:] == [
    "mlflow lacks 5 rows, the oldest of those that waited for it; all of them are in metrics.jsonl"
    " and completions/"
  ]
  assert len(read_metrics(tmp_path)) == 9


def test_a_tracker_that_cannot_be_opened_is_one_line(tmp_path, fake, monkeypatch):
  def refuse(start):
    raise SystemExit("log in\nfirst")

  monkeypatch.setitem(TRACKERS, "mlflow", TRACKERS["mlflow"]._replace(open=refuse))
  with pytest.raises(ConfigError) as error:
    start(tmp_path, "mlflow", -1)
  assert str(error.value) == (
    "config key log.trackers names mlflow, which cannot be used: SystemExit: log in first; the moon"
    " needs no network"
  )
  assert not (tmp_path / "metrics.jsonl").exists()


def test_a_run_that_its_tracker_has_no_more_is_one_line_that_names_the_file(
  tmp_path, fake, monkeypatch
):
  start(tmp_path, "mlflow", -1).close()

  def refuse(start):
    raise ValueError("no such run")

  monkeypatch.setitem(TRACKERS, "mlflow", TRACKERS["mlflow"]._replace(open=refuse))
  with pytest.raises(ConfigError) as error:
    start(tmp_path, "mlflow", -1)
  assert str(error.value).endswith(
    f"the moon needs no network; to begin another run there, remove {tmp_path}/mlflow_id"
  )


def test_a_folder_of_its_name_is_no_package(tmp_path, monkeypatch):
  (tmp_path / "swanlab").mkdir()
  monkeypatch.setattr(sys, "path", [str(tmp_path)])
  monkeypatch.delitem(sys.modules, "swanlab", raising=False)
  with pytest.raises(ConfigError, match="names swanlab, which is not installed"):
    trackers.check_installed(Log(trackers=("swanlab",)))


def threads():
  return {thread for thread in threading.enumerate() if thread.name.startswith("tracker ")}


def test_a_start_that_fails_closes_the_trackers_that_are_open(tmp_path, fake, monkeypatch):
  def refuse(start):
    raise ValueError("log in first")

  before = threads()
  monkeypatch.setitem(TRACKERS, "wandb", TRACKERS["wandb"]._replace(open=refuse))
  open_run(tmp_path, CONFIG)
  with pytest.raises(ConfigError, match="names wandb"):
    trackers.open_all(Log(trackers=("mlflow", "wandb")), tmp_path, pytest.fail)
  assert fake.got == ["failed"] and threads() == before
  (tmp_path / "metrics.jsonl").write_text("no row\n{}\n")
  config = small_config().replace({"log.trackers": ("mlflow",)})
  reporter = Reporter(small_run(config), None, tmp_path, pytest.fail)
  with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
    reporter.open(1)
  reporter.close()
  assert fake.got == ["failed", "failed"] and threads() == before


@pytest.mark.slow
def test_a_run_that_fails_has_failed_at_its_tracker(tmp_path, fake, monkeypatch):
  monkeypatch.setattr(trackers, "check_installed", lambda log: None)
  config = small_config().replace({"log.trackers": ("mlflow",)})

  def fail(*_):
    raise RuntimeError("stop")

  monkeypatch.setattr(Reporter, "header", fail)
  with pytest.raises(RuntimeError, match="stop"):
    grpo_jax.train(config, tmp_path / "run")
  assert fake.got[-1] == "failed"


def test_a_tracker_that_hangs_at_its_end_leaves_stdout_as_it_was(tmp_path, fake, monkeypatch):
  monkeypatch.setattr(trackers.Sender, "patience", 0.1)
  goes_on, stdout, ends = threading.Event(), sys.stdout, TRACKERS["mlflow"].open

  def opened(start):
    return ends(start)._replace(close=lambda has_failed: goes_on.wait(60))

  monkeypatch.setitem(TRACKERS, "mlflow", TRACKERS["mlflow"]._replace(open=opened))
  warnings = []
  start(tmp_path, "mlflow", -1, warnings.append).close()
  assert len(warnings) == 1 and sys.stdout is stdout
  goes_on.set()


def test_all_receivers_are_closed_even_if_one_fails(tmp_path):
  closed = []

  def fail(has_failed):
    raise OSError("disk")

  receivers = [types.SimpleNamespace(close=close) for close in (fail, closed.append)]
  with pytest.raises(OSError, match="disk"):
    RowWriter(tmp_path, -1, False, receivers).close()
  assert closed == [False]


def leveldb_records(log):
  """The records of a file of W&B: LevelDB's log format after a header of 7 bytes.

  Blocks of 32 KiB hold chunks: a checksum (4 bytes), a length (2), a kind (1: a whole record; 2, 3
  and 4: its first, middle and last part) and the content.
  """
  at, parts = 7, []  # the header is in the first block
  log = bytes(7) + log
  while at + 7 <= len(log):
    room = 32768 - at % 32768
    if room < 7:
      at += room
      continue
    length, kind = struct.unpack("<HB", log[at + 4 : at + 7])
    if kind == 0:
      break
    parts.append(log[at + 7 : at + 7 + length])
    at += 7 + length
    if kind in (1, 4):
      yield b"".join(parts)
      parts = []


@pytest.mark.slow
def test_a_real_offline_run_of_wandb_has_config_rows_and_completions_and_goes_on(
  tmp_path, monkeypatch
):
  wandb = pytest.importorskip("wandb")
  from wandb.proto import wandb_internal_pb2

  monkeypatch.setenv("WANDB_MODE", "offline")
  for step in (-1, 1):
    writer = start(tmp_path, "wandb", step)
    writer.completions(step + 2, ROWS)
    writer.write(step + 2, {"reward": 0.5 + step})
    writer.close()
  wandb.teardown()  # its files are complete at the end of the process
  identity = (tmp_path / "wandb_id").read_text()
  files = sorted((tmp_path / "wandb").glob(f"offline-run-*-{identity}/run-{identity}.wandb"))
  assert len(files) == 2  # each start has a file, of the same run
  history, configs = [], []
  for file in files:
    for data in leveldb_records(file.read_bytes()[7:]):
      record = wandb_internal_pb2.Record.FromString(data)
      if record.HasField("history"):
        items = record.history.item
        history.append({x.key or "/".join(x.nested_key): json.loads(x.value_json) for x in items})
      for update in record.run.config.update if record.HasField("run") else ():
        configs.append(update.key or "/".join(update.nested_key))
  assert [row["reward"] for row in history] == [-0.5, 1.5]
  assert all(any("completions" in key for key in row) for row in history)
  assert set(CONFIG) <= {key.split("/")[0] for key in configs}
  tables = list((tmp_path / "wandb").glob("offline-run-*/files/media/table/completions_*.json"))
  assert json.loads(tables[0].read_text())["data"][0][:3] == ["1+1=", ROWS[0]["completion"], 1.0]


def test_wandb_gets_the_rows_and_a_resume_continues_the_same_run(tmp_path, monkeypatch):
  opened, logged = [], []
  run = types.SimpleNamespace(
    log=lambda values, step: logged.append((step, values)),
    finish=lambda exit_code: logged.append("end"),
  )
  fake = types.SimpleNamespace(Settings=dict, init=lambda **kwargs: opened.append(kwargs) or run)
  monkeypatch.setitem(sys.modules, "wandb", fake)
  for step in (-1, 0):
    writer = start(tmp_path, "wandb", step)
    writer.write(step + 1, {"reward": 0.5, "kl": float("nan")})
    writer.close()
  assert logged == [(0, {"reward": 0.5}), "end", (1, {"reward": 0.5}), "end"]
  assert [(o["project"], o["resume"]) for o in opened] == [("sums", "allow")] * 2
  assert opened[0]["id"] == opened[1]["id"] != ""
  assert opened[0]["config"] == json.loads(json.dumps(CONFIG))


@pytest.mark.slow  # it makes a database
def test_a_real_run_of_mlflow_has_config_and_rows_and_goes_on(tmp_path, monkeypatch):
  mlflow = pytest.importorskip("mlflow")
  monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
  two_starts(tmp_path / "run", "mlflow")
  (run,) = mlflow.MlflowClient().search_runs([mlflow.get_experiment_by_name("sums").experiment_id])
  assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
  assert run.data.params["log.project"] == "grpo_jax" and len(run.data.params) > 150
  for name, values in {"reward": [0.5, 1, 1.5, 1.5, 2], "eval/mean_4": [0.25] * 5}.items():
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, name)
    assert sorted((x.step, x.value) for x in history) == list(zip([1, 2, 3, 3, 4], values))


@pytest.mark.slow  # its database is chosen while it is imported, so this needs a process
def test_a_real_run_of_trackio_has_config_and_rows_and_goes_on(tmp_path):
  pytest.importorskip("trackio")
  code = (
    "import trackers_test as t, pathlib, sys; t.two_starts(pathlib.Path(sys.argv[1]), 'trackio')"
  )
  environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio")}
  environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
  subprocess.run([sys.executable, "-c", code, tmp_path / "run"], env=environment, check=True)
  with sqlite3.connect(tmp_path / "trackio/sums.db") as database:
    rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    ((config,),) = database.execute("select config from configs").fetchall()
  assert {name for name, _, _ in rows} == {(tmp_path / "run/trackio_id").read_text()}
  assert [step for _, step, _ in rows] == [1, 2, 3, 3, 4]
  assert json.loads(rows[-1][2]) == {"reward": 2.0, "eval/mean@4": 0.25}
  assert json.loads(config)["log"]["project"] == "grpo_jax"


@pytest.mark.slow
def test_a_real_offline_run_of_swanlab_has_config_and_rows_in_a_folder_of_each_start(
  tmp_path, monkeypatch
):
  pytest.importorskip("swanlab")
  monkeypatch.setenv("SWANLAB_MODE", "offline")
  two_starts(tmp_path, "swanlab")
  identity = (tmp_path / "swanlab_id").read_text()
  runs = sorted((tmp_path / "swanlog").glob(f"run-*-{identity}"))
  assert len(runs) == 2
  for run in runs:
    assert "grpo_jax" in (run / "files/config.yaml").read_text()
    content = (run / f"run-{identity}.swanlab").read_bytes()
    assert b"reward" in content and b"eval/mean@4" in content
