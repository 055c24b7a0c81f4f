"""The learner's side: sends the prompts of a call to sampler processes, and receives completions.

A process only joins. The learner then sends it one part of a call after another. If the process
leaves, another process, or the same one after it has rejoined, draws the part again. The caller
gets each group only once.

The learner has two threads for each process. One receives. The other one sends parts, and new
weights as soon as a step has made them, even while the process draws with older ones.
"""

from collections import deque
from collections.abc import Callable, Sequence
import contextlib
import dataclasses
import itertools
import math
import socket
import sys
import threading
import time
from typing import Any
import weakref

import jax
import numpy as np

from grpo_jax.asynchronous import contents, handshake
from grpo_jax.asynchronous.access import OPEN, Access
from grpo_jax.asynchronous.contents import IMAGES, CompletionLimits
from grpo_jax.asynchronous.messages import (
  BEAT,
  BadMessage,
  Connection,
  DamagedMessage,
  Message,
  Shapes,
)
from grpo_jax.asynchronous.parts import Arrivals, DrawnPart, RemoteCall, RowOfPart
from grpo_jax.asynchronous.terms import difference
from grpo_jax.asynchronous.versions import Leaf, SentVersions, Weights
from grpo_jax.sampler.requests import Finished, StoppedRow
from grpo_jax.sampler.sampling import Draws
from grpo_jax.settings import ConfigError, RunFailed, is_loopback
from grpo_jax.types import Images

_LOOK = 0.25  # seconds between two checks whether the run should stop or has ended
_TELL = 8.0  # seconds between two lines that say what the run waits for
_MOST_CONNECTIONS = 1024
_MOST_STRANGERS = 10  # failed attempts to join that are all reported; then one in _TELL seconds
_MOST_REFUSED = 3  # bad answers to a part from this many samplers fail the call


class SamplingClosed(Exception):
  """The run has ended, or should stop while no process samples."""


@dataclasses.dataclass(eq=False)
class _JoinedProcess:
  """A sampler process that has joined.

  Attributes:
    connection: The connection to the process.
    name: The address of the process, as HOST:PORT.
    part: The part that the process draws, or None.
    coming: The prompts whose groups the process has not sent, as indices in the part.
    is_asked: Whether the part was sent to the process.
    sent: The versions of the weights that the process has.
    is_gone: Whether the connection has ended.
  """

  connection: Connection
  name: str
  part: DrawnPart | None = None
  coming: set[int] = dataclasses.field(default_factory=set)
  is_asked: bool = False
  sent: SentVersions = dataclasses.field(default_factory=SentVersions)
  is_gone: bool = False


class RemoteSampler:
  """A server at which sampler processes join, and which distributes sampling calls to them.

  Attributes:
    address: The address at which the server listens, as HOST:PORT.
  """

  def __init__(
    self,
    address: tuple[str, int],
    terms: dict[str, Any],
    limits: CompletionLimits,
    parts: int = 1,
    should_stop: Callable[[], bool] = lambda: False,
    access: Access = OPEN,
  ):
    """Starts to listen, and accepts processes in a thread.

    Args:
      address: Host and port. Port 0 chooses a free port.
      terms: The terms of the run, with which the terms of a process must agree.
      limits: The limits on completions of the run.
      parts: Into how many parts the prompts of a call are split, at most one for each prompt.
      should_stop: Returns whether the run should stop.
      access: The secret and certificates of the run.

    Raises:
      ConfigError: The address cannot be used.
    """
    self._terms, self._limits = terms, limits
    self._parts, self._should_stop, self._access = parts, should_stop, access
    self._changed = threading.Condition()
    self._waiting = deque[DrawnPart]()  # parts that no process draws
    self._joined: set[_JoinedProcess] = set()
    self._threads: set[threading.Thread] = set()
    self._is_closed = False
    self._has_ended = False  # whether the run is finished, so that processes need not rejoin
    self._numbers = itertools.count()  # the numbers of leaves and versions
    # The arrays and leaves of the last weights, so that unchanged arrays are not sent again.
    self._last: list[tuple[weakref.ref, Leaf]] = []
    # The weights by version. A version exists as long as a part draws with it or it is the newest.
    self._versions: weakref.WeakValueDictionary[int, Weights] = weakref.WeakValueDictionary()
    self._newest: Weights | None = None
    # How many processes could not join, and when a line last said so or asked for a sampler.
    self._strangers, self._told_of_strangers = 0, -math.inf
    self._told_of_none = -math.inf
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
      self._server = socket.create_server(address, family=family)
    except OSError as error:
      raise ConfigError(
        f"config key rollout.listen: nothing can listen at {_shown(address)} ({error}): name an"
        " address of this machine and a free port"
      ) from None
    if access.tls is None and not is_loopback(address[0]):
      _say("remark: the weights travel unencrypted to samplers: rollout.certificate_file is empty")
    self._server.settimeout(_LOOK)  # the thread checks this often whether it should end
    self.address = _shown(self._server.getsockname())
    self._accepting = threading.Thread(target=self._accept, name="samplers", daemon=True)
    self._accepting.start()

  def weights(self, params: Any) -> Weights:
    """Copies weights to the host, where they stay valid after an update donates the arrays.

    Threads start to send the copy to all processes. The caller does not wait for them.

    Args:
      params: Weights as `Parameters.for_sampling` returns them. Arrays that are unchanged since the
        last call, such as those of a frozen base, are not copied again.
    """
    leaves = jax.tree.leaves(params)
    # For each leaf the host copy of the last call if the array is the same object, else None.
    reused = [copy if before() is x else None for x, (before, copy) in zip(leaves, self._last)]
    reused += [None] * (len(leaves) - len(reused))  # in the first call, `_last` is empty
    for x, copy in zip(leaves, reused, strict=True):
      if copy is None:
        x.copy_to_host_async()  # all arrays at once; `np.asarray` then waits for each
    # On a CPU, `np.asarray` may share the memory of the array, which an update will reuse.
    copies = [
      copy or Leaf(next(self._numbers), np.asarray(x).copy())
      for x, copy in zip(leaves, reused, strict=True)
    ]
    self._last = [(weakref.ref(x), copy) for x, copy in zip(leaves, copies, strict=True)]
    weights = Weights(next(self._numbers), tuple(copies))
    with self._changed:
      self._versions[weights.version] = self._newest = weights
      self._changed.notify_all()
    return weights

  def begin(
    self,
    params: Any,
    prompts_PS: np.ndarray,
    prompt_lengths_P: np.ndarray,
    members: int,
    draws: Draws,
    images: Images | None = None,
    *,
    keeps_experts: bool = False,
    pauses: bool = False,
  ) -> RemoteCall:
    """Queues a sampling call, in which processes complete each prompt `members` times.

    The arguments are as in `Sampler`, but `draws.reply` and `draws.end` are ignored: each process
    makes `end` from its config.

    Args:
      params: Weights as `Parameters.for_sampling` returns them, or the result of `weights`.
      prompts_PS: int32, right-padded token ids.
      prompt_lengths_P: int32, how many tokens each prompt has.
      members: G, the number of completions of each prompt.
      draws: How rows draw.
      images: The images of the prompts, or None.
      keeps_experts: Whether completions include the experts of each token.
      pauses: Whether a row that has ended waits for a reply.
    """
    weights = params if isinstance(params, Weights) else self.weights(params)
    arrays = {"prompts_PS": prompts_PS, "prompt_lengths_P": prompt_lengths_P}
    if images is not None:
      arrays |= {f"{IMAGES}{name}": x for name, x in given(images).items()}
    key, settings = np.asarray(jax.random.key_data(draws.key)), given(draws.settings)
    settings |= settings.pop("own", {})  # the user's filters are sent under their names, too
    call, parts = Arrivals(), []
    longest = self._limits.tokens
    if draws.settings.max_tokens is not None:
      longest = min(longest, int(draws.settings.max_tokens))
    count = min(self._parts, len(prompts_PS))
    for prompts in np.array_split(np.arange(len(prompts_PS)), count):
      fields = {
        "members": members,
        # Random numbers depend on a prompt's place in the call, not on how the call is split.
        "first_prompt": draws.first_prompt + int(prompts[0]),
        "settings": settings,
        "keeps_experts": keeps_experts,
        "pauses": pauses,
        "turn_tokens": draws.turn_tokens,
      }
      part_arrays = {name: np.asarray(x)[prompts] for name, x in arrays.items()} | {"key": key}
      answer = contents.PartRequest(
        len(prompts), prompts_PS.shape[1], members, longest, keeps_experts, pauses
      )
      missing = set(range(len(prompts)))
      parts.append(DrawnPart(prompts.tolist(), weights, fields, part_arrays, answer, call, missing))
    with self._changed:
      self._waiting.extend(parts)
      self._changed.notify_all()
    return RemoteCall(self, call, parts)

  def say_ended(self) -> None:
    """Notes that the run has ended. `close` then tells processes that they need not rejoin."""
    self._has_ended = True

  def close(self) -> None:
    """Ends all connections. Calls that wait raise SamplingClosed."""
    with self._changed:
      self._is_closed = True
      self._changed.notify_all()
      threads = {self._accepting, *self._threads}
    until = time.monotonic() + 2 * BEAT
    for thread in threads:
      thread.join(max(0, until - time.monotonic()))
    self._server.close()

  def drop(self, parts: Sequence[DrawnPart]) -> None:
    """Drops parts, for which no caller waits any more."""
    with self._changed:
      for part in parts:
        part.missing.clear()
      self._waiting = deque(part for part in self._waiting if part.missing)

  def reply(self, part: DrawnPart, row: RowOfPart, tokens: Sequence[int] | None) -> None:
    """Replies to a paused row of a part with tokens. None ends the row."""
    with self._changed:
      part.reply(row, tokens)
      self._changed.notify_all()

  def next(self, call: Arrivals, seconds: float) -> Finished | list[StoppedRow] | None:
    """Waits up to `seconds` for ended groups or paused rows of a call.

    Returns:
      The groups or rows, or None if nothing arrived.

    Raises:
      SamplingClosed: The run has ended, or should stop while no process samples.
      RunFailed: Sampling has failed.
    """
    until = time.monotonic() + seconds
    with self._changed:
      while not call:
        if self._is_closed:
          raise SamplingClosed("the run has ended")
        if not self._joined:
          if self._should_stop():  # with a sampler, the call is completed first
            _say("no sampler is there: batches that are not drawn yet may have newer weights")
            raise SamplingClosed("the run was asked to stop, and no sampler is there")
          if time.monotonic() - self._told_of_none >= _TELL:
            self._told_of_none = time.monotonic()
            _say(
              f"waiting for a sampler to join at {self.address}: python -m grpo_jax.sample_for"
              f" --learner={self.address} --config=..."
            )
        left = until - time.monotonic()
        if left <= 0:
          return None
        self._changed.wait(min(left, _LOOK))
      arrived = call.popleft()
    if isinstance(arrived, RunFailed):
      raise arrived
    return arrived

  def _accept(self) -> None:
    """Accepts connections in a thread, and starts a thread for each."""
    while not self._is_closed:
      try:
        connected, address = self._server.accept()
      except TimeoutError:
        continue
      except OSError as error:  # for example because too many files are open
        _say(f"a process could not join: {error}")
        time.sleep(1)
        continue
      if len(self._threads) >= _MOST_CONNECTIONS:
        connected.close()
        continue
      arguments = connected, _shown(address)
      thread = threading.Thread(target=self._handle, args=arguments, name="a sampler", daemon=True)
      with self._changed:
        self._threads.add(thread)
      thread.start()

  def _handle(self, connected: socket.socket, name: str) -> None:
    """Serves one connection in a thread: lets a process join, and receives until it is gone."""
    try:
      process = self._greeted(connected, name)
      if process is not None:
        self._serve(process)
    finally:
      connected.close()
      with self._changed:
        self._threads.discard(threading.current_thread())

  def _greeted(self, connected: socket.socket, name: str) -> _JoinedProcess | None:
    """Lets a process join if it knows the secret and agrees on the terms. Else returns None."""
    try:
      connection = Connection(handshake.accept(connected, self._access))
      try:  # only a process that knows the secret is told why it is refused
        message = connection.receive(most_bytes=0)  # without arrays
        if message.kind != "hello":
          raise BadMessage(f"it began with a message of kind {message.kind[:20]!r}")
        why = difference(self._terms, message.fields.get("terms"))
        if why:
          raise BadMessage(why)
        connection.send("welcome")
        return _JoinedProcess(connection, name)
      except BadMessage as error:
        with contextlib.suppress(OSError):
          connection.send("refused", {"why": str(error)})
        raise
    except BadMessage as error:
      self._say_of_stranger(f"the process at {name} was sent away: {error}")
    except OSError as error:
      if not self._is_closed:
        self._say_of_stranger(f"the process at {name} left before it joined: {error}")
    return None

  def _say_of_stranger(self, line: str) -> None:
    """Prints why a process did not join, at a limited rate, so that the log cannot fill a disk."""
    with self._changed:
      self._strangers += 1
      if self._strangers > _MOST_STRANGERS:
        if time.monotonic() - self._told_of_strangers < _TELL:
          return
        line += f" ({self._strangers} processes so far did not join)"
      self._told_of_strangers = time.monotonic()
    _say(line)

  def _serve(self, process: _JoinedProcess) -> None:
    """Receives from a joined process until it is gone. Then queues its unfinished part again."""
    connection, why = process.connection, ""
    _say(f"a sampler has joined from {process.name}")
    with self._changed:
      self._joined.add(process)
    sender = threading.Thread(target=self._send, args=(process,), daemon=True)
    sender.start()
    try:
      self._receive(process)
    except DamagedMessage as error:  # not refused: the process is not at fault and may rejoin
      _say(f"the connection to the process at {process.name} has ended: {error}")
    except BadMessage as error:
      why = str(error)
      self._refuse(process, why)
    except OSError as error:
      if not self._is_closed:
        _say(f"the process at {process.name} has gone: {error}")
    finally:
      with self._changed:
        process.is_gone = True  # ends the sender, which leaves the connection open
        if process.part is not None and process.part.missing:
          self._waiting.appendleft(process.part)
        self._joined.discard(process)
        self._changed.notify_all()
      if why:
        with contextlib.suppress(OSError):
          connection.send("refused", {"why": why})
      connection.end()
      sender.join()
      connection.close()

  def _refuse(self, process: _JoinedProcess, why: str) -> None:
    """Counts a process that sent a bad message. Fails the call if the weights seem at fault."""
    _say(f"the process at {process.name} was sent away: {why}")
    part = process.part
    if part is None:
      return
    part.refused += 1
    if not contents.are_finite([leaf.array for leaf in part.weights.leaves]):
      part.call.append(RunFailed("the weights are not finite, so no sampler can draw with them"))
    elif part.refused == _MOST_REFUSED:
      # If finite weights are so large that activations overflow, correct samplers send NaN, too.
      part.call.append(
        RunFailed(f"{part.refused} samplers were sent away for what they drew of a batch: {why}")
      )

  def _receive(self, process: _JoinedProcess) -> None:
    """Receives groups and rows from a process until it raises OSError or BadMessage."""

    def check_is_expected(kind: str, fields: dict[str, Any], shapes: Shapes) -> None:
      # Without a part, every message but "alive" is an error.
      if kind == "finished" and process.part is not None:
        contents.check_answer(fields, shapes, process.part.answer, self._limits)
      elif kind == "paused" and process.part is not None:
        contents.check_paused(fields, shapes, process.part.answer, self._limits)
      elif kind != "alive" or shapes:
        raise BadMessage(f"it sent a message of kind {kind[:20]!r}")

    while True:
      message = process.connection.receive(check=check_is_expected)
      if message.kind == "paused":
        assert process.part is not None
        self._paused(message, process.part)
      if message.kind == "finished":
        assert process.part is not None
        process.coming -= self._arrived(message, process.part)
        if not process.coming:
          with self._changed:
            process.part = None
            self._changed.notify_all()

  def _send(self, process: _JoinedProcess) -> None:
    """Sends parts, weights and replies in a thread, until the process or the run has ended."""
    connection = process.connection
    try:
      while (message := self._next_message(process)) is not None:
        connection.send(*message)
        del message  # frees the weights, which are large, while it waits
      if process.is_gone:  # `_serve` closes the connection, perhaps after it has sent a reason
        return
      if self._has_ended:
        connection.send("ended")
        with self._changed:  # the process closes the connection after it has read "ended"
          self._changed.wait_for(lambda: process.is_gone, BEAT)
    except OSError as error:
      if not process.is_gone and not self._is_closed:
        _say(f"the process at {process.name} takes nothing: {error}")
    connection.end()

  def _next_message(
    self, process: _JoinedProcess
  ) -> tuple[str, dict[str, Any], dict[str, np.ndarray]] | None:
    """Waits for the next message to a process: (kind, fields, arrays), or None at the end.

    Assigns a part to the process if it has none. After `BEAT` seconds the message is "alive". All
    versions of the weights are sent, oldest first, unless the part waits for its own version.
    """
    until = time.monotonic() + BEAT
    with self._changed:
      while not (self._is_closed or process.is_gone):
        if process.part is None and self._waiting:
          process.part, process.is_asked = self._waiting.popleft(), False
          process.coming = set(range(len(process.part.prompts)))
          process.part.begin_again()
        part = process.part
        if part is not None and not process.is_asked and part.weights.version in process.sent:
          process.is_asked = True
          return "draw", part.fields | {"version": part.weights.version}, part.arrays
        if part is not None and process.is_asked and part.answers:
          answers, part.answers = part.answers, []
          return "go_on", {"rows": answers}, {}
        existing = sorted(self._versions.items())
        unsent = [weights for version, weights in existing if version not in process.sent]
        if part is not None and not process.is_asked:
          unsent = [part.weights]
        if unsent:
          return "weights", *process.sent.add(unsent[0], {version for version, _ in existing})
        if (left := until - time.monotonic()) <= 0:
          return "alive", {}, {}
        del existing, unsent, part  # so that weights can be freed while it waits
        self._changed.wait(left)
    return None

  def _paused(self, message: Message, part: DrawnPart) -> None:
    """Receives rows that pause. Passes those without a known reply to the caller."""
    asked: list[StoppedRow] = []
    rows = contents.paused(message.fields, message.arrays, part.answer, self._limits)
    with self._changed:
      for row in rows:
        if part.paused((row.prompt, row.member), len(row.tokens)):
          asked.append(row._replace(prompt=part.prompts[row.prompt]))
      if asked:
        part.call.append(asked)
      self._changed.notify_all()

  def _arrived(self, message: Message, part: DrawnPart) -> set[int]:
    """Passes the groups that are new to the caller. Returns all groups' indices in the part.

    Groups that a former process has sent are not new.
    """
    indices = message.fields["prompts"]
    replies = [
      [part.replies.get((index, member), []) for member in range(part.answer.members)]
      for index in indices
    ]
    completions = contents.completions(message.arrays, part.answer, self._limits, replies)
    with self._changed:
      new = [entry for entry, index in enumerate(indices) if index in part.missing]
      if new:
        part.missing -= set(indices)
        prompts = [part.prompts[indices[entry]] for entry in new]
        part.call.append(Finished(prompts, jax.tree.map(lambda x: x[new], completions)))
        self._changed.notify_all()
    return set(indices)


def given(tree: Any) -> dict[str, Any]:
  """The fields of a dataclass that are not None, by name."""
  return {name: value for name, value in vars(tree).items() if value is not None}


def _shown(address: tuple[Any, ...]) -> str:
  """Formats the address of a socket as HOST:PORT."""
  host, port = address[:2]
  return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _say(line: str) -> None:
  # Writes the newline in the same call, because several threads print.
  print(f"{line}\n", end="", file=sys.stderr, flush=True)
