"""The learner's side: gives the prompts of a call to sampler processes, and gets completions.

A process asks for nothing: it joins, and a thread of the learner gives it one part of a call after
another. If it goes away, another one, or the same when it is back, draws that part again. What has
arrived of it is handed on once.
"""

from collections import deque
from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import itertools
import math
import socket
import sys
import threading
import time
from typing import Any, NamedTuple
import weakref

import jax
import numpy as np

from grpo_jax.asynchronous import contents
from grpo_jax.asynchronous.contents import IMAGES, Limits
from grpo_jax.asynchronous.messages import BEAT, BadMessage, Connection, Message, Shapes
from grpo_jax.asynchronous.terms import difference
from grpo_jax.sampler.requests import Finished
from grpo_jax.sampler.sampling import Draws
from grpo_jax.settings import ConfigError, RunFailed
from grpo_jax.types import Images

_LOOK = 0.25  # seconds between two looks at whether the run was asked to stop
_TELL = 8.0  # seconds between two lines that say what the run waits for
_MOST_CONNECTIONS = 1024
_MOST_REFUSED = 3  # samplers that may draw a part wrongly, before it is the part's fault


class Closed(Exception):
  """The run has ended, or it was asked to stop while no process samples."""


class Leaf(NamedTuple):
  """An array of the weights on the host. Equal numbers mean the same array."""

  number: int
  array: np.ndarray


class Weights(NamedTuple):
  """The weights of a policy on the host, in the order of the leaves of their tree."""

  leaves: tuple[Leaf, ...]


_Call = deque[Finished | RunFailed]


@dataclasses.dataclass
class _Part:
  """Some prompts of a call, which one process draws.

  Attributes:
    prompts: Their numbers in the call.
    weights: What draws them.
    fields, arrays: The message.
    answer: What the message asks for.
    call: Gets what has been drawn, or why nothing will be.
    missing: Those of the part that have not arrived, as numbers in the part.
    refused: How many processes were sent away for what they drew of it.
  """

  prompts: list[int]
  weights: Weights
  fields: dict[str, Any]
  arrays: dict[str, np.ndarray]
  answer: contents.Part
  call: _Call
  missing: set[int]
  refused: int = 0


class RemoteSampler:
  """Samples as a `Sampler` does, in processes that join at an address.

  Attributes:
    address: Where it listens, as HOST:PORT.
  """

  def __init__(
    self,
    address: tuple[str, int],
    terms: dict[str, Any],
    limits: Limits,
    parts: int = 1,
    should_stop: Callable[[], bool] = lambda: False,
  ):
    """Listens.

    Args:
      address: The host and the port, 0 for a free one.
      terms: What processes must have in common with the run.
      limits: What the completions of the run can be.
      parts: Into how many parts the prompts of a call are split.
      should_stop: Whether the run was asked to stop.

    Raises:
      ConfigError: It cannot listen there.
    """
    self._terms, self._limits = terms, limits
    self._parts, self._should_stop = parts, should_stop
    self._changed = threading.Condition()
    self._waiting = deque[_Part]()  # parts that no process draws
    self._joined: set[Connection] = set()
    self._threads: set[threading.Thread] = set()
    self._is_closed = self._has_ended = False
    self._numbers = itertools.count()
    self._last: list[tuple[weakref.ref, Leaf]] = []
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
      self._server = socket.create_server(address, family=family)
    except OSError as error:
      raise ConfigError(
        f"config key rollout.listen: nothing can listen at {_shown(address)} ({error}): name an"
        " address of this machine and a free port"
      ) from None
    self._server.settimeout(_LOOK)
    self.address = _shown(self._server.getsockname())
    self._accepting = threading.Thread(target=self._accept, name="samplers", daemon=True)
    self._accepting.start()

  def weights(self, params: Any) -> Weights:
    """A copy on the host, which stays when an update takes the arrays.

    Args:
      params: As `Parameters.for_sampling` returns them. Arrays that were in the last ones, such as
        those of a frozen base, are not copied again.
    """
    leaves = jax.tree.leaves(params)
    known = [copy if before() is x else None for x, (before, copy) in zip(leaves, self._last)]
    known += [None] * (len(leaves) - len(known))
    for x, copy in zip(leaves, known, strict=True):
      if copy is None:
        x.copy_to_host_async()
    copies = [
      copy or Leaf(next(self._numbers), np.asarray(x).copy())
      for x, copy in zip(leaves, known, strict=True)
    ]
    self._last = [(weakref.ref(x), copy) for x, copy in zip(leaves, copies, strict=True)]
    return Weights(tuple(copies))

  def __call__(
    self,
    params: Any,
    prompts_PS: np.ndarray,
    prompt_lengths_P: np.ndarray,
    members: int,
    draws: Draws,
    images: Images | None = None,
    *,
    keeps_experts: bool = False,
  ) -> Iterator[Finished]:
    """Completes each prompt `members` times.

    The arguments are those of `Sampler`, but for `draws.end`, which each process makes of its
    config, and `keeps_experts`, with which completions have the experts of each token.

    Args:
      params: As `Parameters.for_sampling` returns them, or their `Weights`.

    Yields:
      Groups as they arrive, each prompt once.

    Raises:
      Closed: Nothing will come.
      RunFailed: The weights are not finite, so that nothing can be drawn with them.
    """
    weights = params if isinstance(params, Weights) else self.weights(params)
    arrays = {"prompts_PS": prompts_PS, "prompt_lengths_P": prompt_lengths_P}
    if images is not None:
      arrays |= {f"{IMAGES}{name}": x for name, x in given(images).items()}
    key, settings = np.asarray(jax.random.key_data(draws.key)), given(draws.settings)
    call, parts = _Call(), []
    longest = self._limits.tokens
    if draws.settings.max_tokens is not None:
      longest = min(longest, int(draws.settings.max_tokens))
    for prompts in np.array_split(np.arange(len(prompts_PS)), self._parts):
      fields = {
        "members": members,
        "first_prompt": draws.first_prompt + int(prompts[0]),
        "settings": settings,
        "keeps_experts": keeps_experts,
      }
      own = {name: np.asarray(x)[prompts] for name, x in arrays.items()} | {"key": key}
      size = len(prompts), prompts_PS.shape[1]
      answer = contents.Part(*size, members, longest, keeps_experts)
      numbers = set(range(len(prompts)))
      parts.append(_Part(prompts.tolist(), weights, fields, own, answer, call, numbers))
    return self._arriving(call, parts)

  def say_ended(self) -> None:
    """From here on, processes that are told to leave need not come back."""
    self._has_ended = True

  def close(self) -> None:
    """Ends all connections, and calls that wait."""
    with self._changed:
      self._is_closed = True
      self._changed.notify_all()
      threads = {self._accepting, *self._threads}
    for thread in threads:
      thread.join(2 * BEAT)
    self._server.close()

  def _arriving(self, call: _Call, parts: list[_Part]) -> Iterator[Finished]:
    with self._changed:
      self._waiting.extend(parts)
      self._changed.notify_all()
    left = sum(len(part.prompts) for part in parts)
    try:
      while left > 0:
        finished = self._next(call)
        left -= len(finished.prompts)
        yield finished
    finally:  # nobody need draw what nobody waits for
      with self._changed:
        for part in parts:
          part.missing.clear()
        self._waiting = deque(part for part in self._waiting if part.missing)

  def _next(self, call: _Call) -> Finished:
    """Waits for groups of a call."""
    told_at = -math.inf
    with self._changed:
      while not call:
        if self._is_closed:
          raise Closed("the run has ended")
        if not self._joined:
          if self._should_stop():
            _say("no sampler is there: batches that are not drawn yet will have newer weights")
            raise Closed("the run was asked to stop, and no sampler is there")
          if time.monotonic() - told_at >= _TELL:
            told_at = time.monotonic()
            _say(
              f"waiting for a sampler to join at {self.address}: python -m grpo_jax.sample_for"
              f" --learner={self.address} --config=..."
            )
        self._changed.wait(_LOOK)
      arrived = call.popleft()
    if isinstance(arrived, RunFailed):
      raise arrived
    return arrived

  def _accept(self) -> None:
    """Lets processes join. This is a thread."""
    while not self._is_closed:
      try:
        connected, address = self._server.accept()
      except TimeoutError:
        continue
      except OSError as error:  # too many files are open, for example
        _say(f"a process could not join: {error}")
        time.sleep(1)
        continue
      if len(self._threads) >= _MOST_CONNECTIONS:
        connected.close()
        continue
      arguments = Connection(connected), _shown(address)
      thread = threading.Thread(target=self._serve, args=arguments, name="a sampler", daemon=True)
      with self._changed:
        self._threads.add(thread)
      thread.start()

  def _serve(self, connection: Connection, name: str) -> None:
    """Talks to one process until it has gone. This is a thread."""
    try:
      self._greet(connection, name)
      known: list[int] = []
      while self._give(connection, known):
        pass
      if self._has_ended:
        connection.send("ended")
    except BadMessage as error:
      _say(f"the process at {name} was sent away: {error}")
      with contextlib.suppress(OSError):
        connection.send("refused", {"why": str(error)})
    except OSError as error:
      if not self._is_closed:
        _say(f"the process at {name} has gone: {error}")
    finally:
      connection.close()
      with self._changed:
        self._joined.discard(connection)
        self._threads.discard(threading.current_thread())
        self._changed.notify_all()

  def _greet(self, connection: Connection, name: str) -> None:
    """Lets a process join that would sample as this run does. Raises BadMessage otherwise."""
    if not connection.has_something(seconds=10):
      raise BadMessage("it said nothing")
    message = connection.receive(most_bytes=0)
    if message.kind != "hello":
      raise BadMessage(f"it began with a message of kind {message.kind[:20]!r}")
    why = difference(self._terms, message.fields.get("terms"))
    if why:
      raise BadMessage(why)
    connection.send("welcome")
    _say(f"a sampler has joined from {name}")
    with self._changed:
      self._joined.add(connection)

  def _give(self, connection: Connection, known: list[int]) -> bool:
    """Gives a process a part and gets it drawn. Returns whether there may be more."""
    part = self._take(connection)
    if part is None:
      return False
    try:
      self._draw(connection, part, known)
    except BadMessage as error:
      part.refused += 1
      if not contents.are_finite([leaf.array for leaf in part.weights.leaves]):
        part.call.append(RunFailed("the weights are not finite, so no sampler can draw with them"))
      elif part.refused == _MOST_REFUSED:
        # Honest samplers send NaN where finite weights are so large that activations overflow.
        part.call.append(
          RunFailed(
            f"{part.refused} samplers were sent away for what they drew of a batch: {error}"
          )
        )
      raise
    finally:
      with self._changed:
        if part.missing:
          self._waiting.appendleft(part)
    return True

  def _take(self, connection: Connection) -> _Part | None:
    """Waits for a part that nobody draws, and for a sign of life. None if the run has ended."""
    while True:
      until = time.monotonic() + BEAT
      with self._changed:
        while (left := until - time.monotonic()) > 0:
          if self._is_closed:
            return None
          if self._waiting:
            return self._waiting.popleft()
          self._changed.wait(left)
      connection.send("alive")
      self._expect(connection.receive(most_bytes=0), "alive")

  def _draw(self, connection: Connection, part: _Part, known: list[int]) -> None:
    """Lets a process draw a part. `known` are the numbers of the leaves that it has."""
    leaves = part.weights.leaves
    new = {
      str(place): leaf.array
      for place, leaf in enumerate(leaves)
      if place >= len(known) or known[place] != leaf.number
    }
    if new:
      connection.send("weights", {"leaves": len(leaves)}, new)
      known[:] = [leaf.number for leaf in leaves]
    connection.send("draw", part.fields, part.arrays)
    coming, is_asked = set(range(len(part.prompts))), False
    most_bytes = contents.answer_bytes(part.answer, self._limits)

    def check(kind: str, fields: dict[str, Any], shapes: Shapes) -> None:
      if kind == "finished":
        contents.check_answer(fields, shapes, part.answer, self._limits)

    while (coming or is_asked) and not self._is_closed:
      if not is_asked and not connection.has_something(BEAT):
        connection.send("alive")
        is_asked = True
      message = connection.receive(most_bytes, check)
      self._expect(message, "alive", "finished")
      if message.kind == "finished":
        coming -= self._arrived(message, part)
      else:
        is_asked = False

  def _arrived(self, message: Message, part: _Part) -> set[int]:
    """Hands on groups that arrive for the first time. Returns the numbers of all in the part."""
    numbers = message.fields["prompts"]
    completions = contents.completions(message.arrays, part.answer, self._limits)
    with self._changed:
      new = [place for place, number in enumerate(numbers) if number in part.missing]
      if new:
        part.missing -= set(numbers)
        prompts = [part.prompts[numbers[place]] for place in new]
        part.call.append(Finished(prompts, jax.tree.map(lambda x: x[new], completions)))
        self._changed.notify_all()
    return set(numbers)

  def _expect(self, message: Message, *kinds: str) -> None:
    if message.kind not in kinds:
      raise BadMessage(f"it sent a message of kind {message.kind[:20]!r}")


def given(tree: Any) -> dict[str, Any]:
  """The fields of a struct that are not None, by name."""
  return {name: value for name, value in vars(tree).items() if value is not None}


def _shown(address: tuple[Any, ...]) -> str:
  """An address of a socket as HOST:PORT."""
  host, port = address[:2]
  return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _say(line: str) -> None:
  print(line, file=sys.stderr, flush=True)
