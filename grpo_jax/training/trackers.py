"""Sends the rows of a run to Weights & Biases, MLflow, Trackio and SwanLab.

`TRACKERS` has a record for each. Whatever a tracker does, it does in a thread of its own: a step
waits for no network, and a tracker's handlers of signals do not take the place of the run's.
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
import sys
import threading
import time
from typing import Any, NamedTuple

from grpo_jax.config import Log
from grpo_jax.foreign import text_of
from grpo_jax.progress import doing
from grpo_jax.settings import ConfigError
from grpo_jax.storage.json_files import replace_file
from grpo_jax.storage.saved_config import flat, read_values
from grpo_jax.storage.tensorboard import MOST_SHOWN, columns

Rows = Sequence[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Start:
  """A start of a run, as a tracker sees it.

  Attributes:
    tracker: The name of the tracker.
    project: The project that the user named.
    folder: The folder of the run's files, where a tracker may have one of its own.
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
    """The file that keeps the tracker's id of the run."""
    return self.folder / f"{self.tracker}_id"

  def identity(self, make: Callable[[], str] = lambda: secrets.token_hex(8)) -> str:
    """The tracker's id of the run. `make` makes it at the first start."""
    if not self.id_file.exists():
      replace_file(self.id_file, make())
    return self.id_file.read_text()


class OpenTracker(NamedTuple):
  """A run that is open at a tracker.

  Attributes:
    log: (step, finite numbers by name) -> None.
    close: (whether the run has failed) -> None. Sends what is not sent yet, and ends the run there.
    completions: (step, rows) -> None, if the tracker shows tables.
  """

  log: Callable[[int, dict[str, float]], Any]
  close: Callable[[bool], Any]
  completions: Callable[[int, Rows], Any] | None = None


class Tracker(NamedTuple):
  """A tracker. Its name is that of its package, and of the extra of setup.py that installs it.

  Attributes:
    open: Opens a run. One that is there already goes on, if the tracker can do that.
    offline: How the user works without its server, for an error message.
  """

  open: Callable[[Start], OpenTracker]
  offline: str


def _open_wandb(start: Start) -> OpenTracker:
  """Opens the run at Weights & Biases, or goes on with it."""
  import wandb  # these packages are optional

  run = wandb.init(
    project=start.project,
    id=start.identity(),
    resume="allow",
    name=start.name,
    dir=str(start.folder),
    config=dict(start.config),
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


_MOST_PARAMS = 100  # that MLflow takes at once
_LONGEST_PARAM = 6000  # characters


def _open_mlflow(start: Start) -> OpenTracker:
  """Opens the run at MLflow, or goes on with it."""
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
  client.update_run(run_id, status="RUNNING")

  def log(step: int, values: dict[str, float]) -> None:
    now = int(1000 * time.time())
    # The characters that it takes. Of ours, it lacks @.
    named = {re.sub(r"[^-/\w. :]", "_", name): value for name, value in values.items()}
    client.log_batch(run_id, [Metric(k, value, now, step) for k, value in named.items()])

  def close(has_failed: bool) -> None:
    client.set_terminated(run_id, "FAILED" if has_failed else "FINISHED")

  return OpenTracker(log, close)


def _open_trackio(start: Start) -> OpenTracker:
  import trackio

  # It knows a run by its name, which must not be that of a run in another folder.
  name = start.identity(lambda: f"{start.name}-{secrets.token_hex(4)}")
  run = trackio.init(start.project, name=name, config=dict(start.config), resume="allow")
  return OpenTracker(lambda step, values: run.log(values, step=step), lambda _: run.finish())


def _open_swanlab(start: Start) -> OpenTracker:
  """Opens the run at SwanLab, or goes on with it."""
  import swanlab

  run = swanlab.init(
    project=start.project,
    id=start.identity(),
    resume="allow",
    name=start.name,
    log_dir=str(start.folder / "swanlog"),
    config=dict(start.config),
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


def check_installed(log: Log) -> None:
  """Raises ConfigError if a tracker that the config names is not installed."""
  for name in log.trackers:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:  # a folder of its name, such as ./wandb, has no origin
      raise ConfigError(
        f"config key log.trackers names {name}, which is not installed: pip install -e '.[{name}]'"
      )


def open_all(log: Log, workdir: Path, warn: Callable[[str], None]) -> list["Sender"]:
  """Opens the run at the trackers that the config names.

  Args:
    log: The section of the config.
    workdir: The folder of the run's files on this machine, with its config.json.
    warn: Gets a line about a tracker that fails later.

  Raises:
    ConfigError: A tracker cannot be used. Those before it are closed.
  """
  config = read_values(workdir / "config.json")
  senders = []
  with contextlib.ExitStack() as stack:
    for name in dict.fromkeys(log.trackers):
      sender = Sender(Start(name, log.project, workdir, config), warn)
      stack.callback(sender.close, has_failed=True)
      senders.append(sender)
    stack.pop_all()
  return senders


class Sender:
  """Sends the rows of a run to a tracker. One that fails says so once and ends no run."""

  patience = 60.0  # seconds that a tracker has at the end of the run
  most_waiting = 1000  # rows and tables that wait. For another one, the oldest is dropped

  def __init__(self, start: Start, warn: Callable[[str], None]) -> None:
    """Opens the run at the tracker, which may take long.

    Raises:
      ConfigError: It cannot be opened.
    """
    name = self._name = start.tracker
    self._warn = warn
    self._tasks = deque[Callable[[], Any] | None]()
    self._has_tasks = threading.Condition()
    self._dropped = 0
    self._opened: OpenTracker | None = None
    self._error: BaseException | None = None  # the first one, until it is said
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
    """Sends a row, or numbers that are added to the last one. Returns at once."""
    self._put(functools.partial(self._opened.log, step, dict(values)))

  def completions(self, step: int, rows: Rows) -> None:
    """Sends completions, if the tracker shows tables. Returns at once."""
    if self._opened.completions is not None:
      self._put(functools.partial(self._opened.completions, step, rows[:MOST_SHOWN]))

  def close(self, has_failed: bool = False) -> None:
    """Waits until everything is sent and the run is ended there, but not for ever."""
    with doing(f"sending the last rows to {self._name}"), _no_stdout():
      self._put(functools.partial(self._opened.close, has_failed), None)
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
    """The oldest task. Waits for one. None is the end."""
    with self._has_tasks:
      self._has_tasks.wait_for(lambda: self._tasks)
      return self._tasks.popleft()

  def _say_failure(self) -> None:
    if self._error is not None and not self._has_said_failure:
      self._has_said_failure = True
      self._warn(
        f"{self._name} has failed, and may lack rows; the run goes on, and all of them are in"
        f" metrics.jsonl: {_line(self._error)}"
      )

  def _run(self, start: Start) -> None:
    """The thread."""
    try:
      self._opened = TRACKERS[self._name].open(start)
    except BaseException as error:  # no key, no network, sys.exit: each has its own exception
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
  """Lets what is printed go to stderr, because stdout may be for a program.

  It is of the whole process. So it is whoever waits for a tracker that holds it, and no tracker
  that may hang.
  """
  return contextlib.redirect_stdout(sys.stderr)


def _line(error: BaseException) -> str:
  """An exception in one line."""
  text = " ".join(text_of(error).split())
  return f"{type(error).__name__}: {text:.300}" if text else type(error).__name__
