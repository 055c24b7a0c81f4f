"""Sends the rows of a run to Weights & Biases, MLflow, Trackio and SwanLab.

`TRACKERS` has a record for each. Each tracker runs in a separate thread, so that steps do not wait
for the network, and a tracker cannot replace the run's signal handlers.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import functools
import importlib.util
from pathlib import Path
import re
import secrets
import threading
import time
from typing import Any, NamedTuple

from grpo_jax.config import Log
from grpo_jax.foreign import printing_to_stderr, text_of
from grpo_jax.progress import doing
from grpo_jax.settings import ConfigError
from grpo_jax.storage.json_files import replace_file
from grpo_jax.storage.saved_config import flat, read_values
from grpo_jax.storage.tensorboard import MOST_SHOWN, columns

Rows = Sequence[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Start:
  """The data with which a tracker opens a run.

  Attributes:
    tracker: The name of the tracker.
    project: The name of the project, from the config.
    folder: The folder of the run's files, in which a tracker may make a subfolder.
    config: The nested values of config.json.
  """

  tracker: str
  project: str
  folder: Path
  config: Mapping[str, Any]

  @property
  def name(self) -> str:
    """The name of the run."""
    return self.folder.name

  @property
  def id_file(self) -> Path:
    """The file that stores the tracker's id of the run."""
    return self.folder / f"{self.tracker}_id"

  def identity(self, make: Callable[[], str] = lambda: secrets.token_hex(8)) -> str:
    """The tracker's id of the run. make() returns it at the first start, and a file stores it."""
    if not self.id_file.exists():
      replace_file(self.id_file, make())
    return self.id_file.read_text()


class OpenTracker(NamedTuple):
  """The functions of a run that is open at a tracker.

  Attributes:
    log: log(step, values) sends finite numbers by name.
    close: close(has_failed) sends all remaining data, and ends the run at the tracker.
    completions: completions(step, rows) sends a table. None if the tracker shows no tables.
  """

  log: Callable[[int, dict[str, float]], Any]
  close: Callable[[bool], Any]
  completions: Callable[[int, Rows], Any] | None = None


class Tracker(NamedTuple):
  """A tracker. Its name is also the name of its package, and of the extra that installs it.

  Attributes:
    open: open(Start) -> the open run. It continues an existing run, if the tracker can do that.
    offline: How to use the tracker without its server, for an error message.
  """

  open: Callable[[Start], OpenTracker]
  offline: str


def _open_wandb(start: Start) -> OpenTracker:
  """Opens the run at Weights & Biases, or continues it."""
  import wandb  # these packages are optional

  run = wandb.init(
    project=start.project,
    id=start.identity(),
    resume="allow",
    name=start.name,
    dir=str(start.folder),
    config=dict(start.config),
    # Only rows are sent, and not the text that the run prints.
    settings=wandb.Settings(console="off"),
  )

  def completions(step: int, rows: Rows) -> None:
    names = columns(rows)
    data = [[row.get(name) for name in names] for row in rows[:MOST_SHOWN]]
    run.log({"completions": wandb.Table(columns=names, data=data)}, step=step)

  return OpenTracker(
    lambda step, values: run.log(values, step=step),
    lambda has_failed: run.finish(exit_code=int(has_failed)),
    completions,
  )


_MOST_PARAMS = 100  # MLflow's limit on parameters in a request
_LONGEST_PARAM = 6000  # MLflow's limit on characters in a parameter


def _open_mlflow(start: Start) -> OpenTracker:
  """Opens the run at MLflow, or continues it."""
  from mlflow import MlflowClient
  from mlflow.entities import Metric, Param

  client = MlflowClient()

  def create() -> str:
    found = client.get_experiment_by_name(start.project)
    experiment = found.experiment_id if found else client.create_experiment(start.project)
    run_id = client.create_run(experiment, run_name=start.name).info.run_id
    params = [Param(k, str(v)[:_LONGEST_PARAM]) for k, v in flat(start.config).items()]
    for first in range(0, len(params), _MOST_PARAMS):
      client.log_batch(run_id, params=params[first : first + _MOST_PARAMS])
    return run_id

  run_id = start.identity(create)
  client.update_run(run_id, status="RUNNING")  # `close` may have ended the run that continues now

  def log(step: int, values: dict[str, float]) -> None:
    now = int(1000 * time.time())  # milliseconds, as MLflow wants them
    # MLflow allows only these characters in names. Some of our metrics have "@".
    named = {re.sub(r"[^-/\w. :]", "_", name): value for name, value in values.items()}
    client.log_batch(run_id, [Metric(k, value, now, step) for k, value in named.items()])

  def close(has_failed: bool) -> None:
    client.set_terminated(run_id, "FAILED" if has_failed else "FINISHED")

  return OpenTracker(log, close)


def _open_trackio(start: Start) -> OpenTracker:
  """Opens the run at Trackio, or continues it."""
  import trackio

  # Trackio identifies a run by its name, so the name must be unique among the runs of all folders.
  name = start.identity(lambda: f"{start.name}-{secrets.token_hex(4)}")
  run = trackio.init(start.project, name=name, config=dict(start.config), resume="allow")
  return OpenTracker(lambda step, values: run.log(values, step=step), lambda _: run.finish())


def _open_swanlab(start: Start) -> OpenTracker:
  """Opens the run at SwanLab, or continues it."""
  import swanlab

  run = swanlab.init(
    project=start.project,
    id=start.identity(),
    resume="allow",
    name=start.name,
    log_dir=str(start.folder / "swanlog"),
    config=dict(start.config),
    # Only rows are sent, and not the text that the run prints.
    settings=swanlab.Settings(terminal=swanlab.Settings.Terminal(proxy_type="none")),
  )
  return OpenTracker(
    lambda step, values: run.log(values, step=step),
    lambda has_failed: run.finish("crashed", "an error") if has_failed else run.finish(),
  )


TRACKERS = {
  "wandb": Tracker(_open_wandb, "WANDB_MODE=offline needs no network"),
  "mlflow": Tracker(_open_mlflow, "MLFLOW_TRACKING_URI=sqlite:////FOLDER/FILE.db needs no server"),
  "trackio": Tracker(_open_trackio, "without TRACKIO_SPACE_ID it needs no network"),
  "swanlab": Tracker(_open_swanlab, "SWANLAB_MODE=offline needs no network"),
}


def is_installed(name: str) -> bool:
  """Whether the package of a tracker is installed."""
  spec = importlib.util.find_spec(name)
  return spec is not None and spec.origin is not None  # without one, it is a folder such as ./wandb


def check_installed(log: Log) -> None:
  """Raises ConfigError if a tracker that the config names is not installed."""
  for name in log.trackers:
    if not is_installed(name):
      raise ConfigError(
        f"config key log.trackers names {name}, which is not installed: pip install -e '.[{name}]'"
      )


def open_all(log: Log, workdir: Path, warn: Callable[[str], None]) -> list["Sender"]:
  """Opens the run at the trackers that the config names.

  Args:
    log: The section `log` of the config.
    workdir: The folder of the run's files on this machine, with its config.json.
    warn: warn(line) is called if a tracker fails later.

  Raises:
    ConfigError: A tracker cannot be used. The trackers opened before it are closed.
  """
  config = read_values(workdir / "config.json")
  senders = []
  with contextlib.ExitStack() as stack:  # closes them if a later one cannot be opened
    for name in dict.fromkeys(log.trackers):
      sender = Sender(Start(name, log.project, workdir, config), warn)
      stack.callback(sender.close, has_failed=True)
      senders.append(sender)
    stack.pop_all()
  return senders


class Sender:
  """Sends the rows of a run to a tracker, in a thread. If that fails, it warns once."""

  patience = 60.0  # how many seconds to wait for the tracker at the end of the run
  most_waiting = 1000  # limit on queued rows and tables; beyond it, the oldest is dropped

  def __init__(self, start: Start, warn: Callable[[str], None]) -> None:
    """Opens the run at the tracker, which may take long. `warn(line)` shows a warning.

    Raises:
      ConfigError: The run cannot be opened.
    """
    name = self._name = start.tracker
    self._warn = warn
    self._tasks = deque[Callable[[], Any] | None]()  # the queued calls; None ends the thread
    self._has_tasks = threading.Condition()  # guards the queue
    self._dropped = 0  # how many tasks were dropped because the queue was full
    self._opened: OpenTracker | None = None
    self._error: BaseException | None = None  # the first error in the thread
    self._is_open = threading.Event()
    self._has_said_failure = False
    has_begun = start.id_file.exists()
    thread = self._thread = threading.Thread(
      target=self._run, args=(start,), name=f"tracker {name}", daemon=True
    )
    with doing(f"opening {name}"), _no_stdout():
      thread.start()
      self._is_open.wait()
    if self._error is not None:
      another = f"; to begin another run there, remove {start.id_file}" if has_begun else ""
      raise ConfigError(
        f"config key log.trackers names {name}, which cannot be used: {_line(self._error)};"
        f" {TRACKERS[name].offline}{another}"
      ) from self._error

  def log(self, step: int, values: Mapping[str, float]) -> None:
    """Queues a row, or numbers to add to the last row. Returns at once."""
    self._put(functools.partial(self._opened.log, step, dict(values)))

  def completions(self, step: int, rows: Rows) -> None:
    """Queues completions, if the tracker shows tables. Returns at once."""
    if self._opened.completions is not None:
      self._put(functools.partial(self._opened.completions, step, rows[:MOST_SHOWN]))

  def close(self, has_failed: bool = False) -> None:
    """Ends the run at the tracker. Waits at most `patience` seconds until everything is sent."""
    with doing(f"sending the last rows to {self._name}"), _no_stdout():
      self._put(functools.partial(self._opened.close, has_failed), None)  # None ends the thread
      self._thread.join(self.patience)
    if self._dropped:
      self._warn(
        f"{self._name} lacks {self._dropped} rows, the oldest of those that waited for it; all of"
        " them are in metrics.jsonl and completions/"
      )
    if self._thread.is_alive():
      self._warn(
        f"{self._name} has not taken all rows within {self.patience:.0f} seconds, and the run waits"
        " no longer; all of them are in metrics.jsonl"
      )
    self._say_failure()

  def _put(self, *tasks: Callable[[], Any] | None) -> None:
    """Queues tasks. If the queue is full, drops the oldest tasks, and warns the first time."""
    self._say_failure()
    with self._has_tasks:
      surplus = max(0, len(self._tasks) + len(tasks) - self.most_waiting)
      for _ in range(surplus):
        self._tasks.popleft()
      self._tasks.extend(tasks)
      self._has_tasks.notify()
    if surplus and not self._dropped:
      self._warn(
        f"{self._name} takes no rows: {self.most_waiting} wait, and for each further one the oldest"
        " is dropped; all of them are in metrics.jsonl and completions/"
      )
    self._dropped += surplus

  def _next(self) -> Callable[[], Any] | None:
    """Waits for a task and removes the oldest one from the queue. None is the end."""
    with self._has_tasks:
      self._has_tasks.wait_for(lambda: self._tasks)
      return self._tasks.popleft()

  def _say_failure(self) -> None:
    """Warns of the thread's first error, once."""
    if self._error is not None and not self._has_said_failure:
      self._has_said_failure = True
      self._warn(
        f"{self._name} has failed, and may lack rows; the run goes on, and all of them are in"
        f" metrics.jsonl: {_line(self._error)}"
      )

  def _run(self, start: Start) -> None:
    """Runs in the thread: opens the run, then executes the queued tasks."""
    try:
      self._opened = TRACKERS[self._name].open(start)
    except BaseException as error:  # no key, no network or sys.exit, with different exceptions
      self._error = error
      return
    finally:
      self._is_open.set()
    while (task := self._next()) is not None:
      try:
        task()
      except BaseException as error:
        self._error = self._error or error


def _no_stdout() -> contextlib.AbstractContextManager[Any]:
  """Redirects printed text to stderr, because a program may read stdout.

  The redirection applies to the whole process. So the waiting thread holds it for a limited time,
  and not the tracker's thread, which may hang.
  """
  return printing_to_stderr()


def _line(error: BaseException) -> str:
  """Describes an exception in one line."""
  text = " ".join(text_of(error).split())
  return f"{type(error).__name__}: {text:.300}" if text else type(error).__name__
