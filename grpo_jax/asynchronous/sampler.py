"""The code of a sampler process: it joins a learner, draws parts, and rejoins a restarted learner.

A sampler process has no state but weights, so it can be killed and restarted at any time. One
thread receives newer weights while another one draws.
"""

from collections.abc import Iterator, Sequence
import contextlib
import queue
import threading
import time
from typing import Any

import jax
import numpy as np

from grpo_jax.asynchronous import contents, handshake
from grpo_jax.asynchronous.access import OPEN, Access
from grpo_jax.asynchronous.contents import IMAGES
from grpo_jax.asynchronous.learner import given
from grpo_jax.asynchronous.messages import BEAT, BadMessage, Connection, Message, Shapes
from grpo_jax.asynchronous.terms import abstract_weights, terms_of
from grpo_jax.asynchronous.versions import KeptVersions
from grpo_jax.pending import SOON
from grpo_jax.run.run import Run
from grpo_jax.sampler.filters import FILTERS
from grpo_jax.sampler.logits import RowSettings
from grpo_jax.sampler.requests import Finished, StoppedRow
from grpo_jax.sampler.sampling import Draws, requests_of
from grpo_jax.sampler.stop import end_at
from grpo_jax.settings import ConfigError, RunFailed
from grpo_jax.types import Images

_MOST_BYTES = 2**34  # the most bytes of prompts and their images
_PAUSE = 1.0  # seconds between two attempts to join
_MOST_BAD = 5  # consecutive bad messages after which the process gives up


def sample_for(
  run: Run, address: tuple[str, int], give_up_after: float, access: Access = OPEN
) -> None:
  """Joins the learner at an address, and draws for it until its run has ended.

  Args:
    run: A run with the learner's config, on the devices of this process.
    address: Host and port of the learner.
    give_up_after: For how many seconds to retry while no learner can be reached.
    access: The secret and certificates of this process.

  Raises:
    ConfigError: The learner has another secret or certificate, or refuses this process because its
      config would draw other completions.
    RunFailed: No learner was reached in time, the learner disconnected this process because of a
      bad answer, or the learner repeatedly sent bad messages.
  """
  config = run.config
  # The devices of this process must be able to share the prompts of a part evenly.
  prompts_of_part = config.batch.prompts // config.rollout.samplers
  run.hosts.check_rows({"batch.prompts / rollout.samplers": prompts_of_part})
  drawer, terms = Drawer(run), terms_of(run)
  learner, printed_reason, seen_at = f"{address[0]}:{address[1]}", "", time.monotonic()
  bad_in_a_row, drawn_before = 0, 0
  while True:
    try:
      with _joined(address, access, terms) as connection:
        print(f"joined the run at {learner}", flush=True)
        printed_reason = ""
        try:
          _draw_until_ended(connection, drawer)
        finally:
          seen_at = time.monotonic()
      print("the run has ended", flush=True)
      return
    except (BadMessage, OSError) as error:
      why, is_bad = str(error), isinstance(error, BadMessage)
      if is_bad:
        # A part that was drawn since the last bad message begins a new count.
        bad_in_a_row = bad_in_a_row + 1 if drawer.drawn == drawn_before else 1
        drawn_before = drawer.drawn
        if bad_in_a_row == _MOST_BAD:
          raise RunFailed(f"the learner at {learner} sends what cannot be drawn: {why}") from error
    if time.monotonic() - seen_at > give_up_after:
      raise RunFailed(f"no learner was at {learner} for {give_up_after:g} seconds: {why}")
    if why != printed_reason:
      what = "left the learner" if is_bad else "no learner"
      print(f"{what} at {learner}, trying again: {why}", flush=True)
      printed_reason = why
    time.sleep(_PAUSE)


class Drawer:
  """Draws parts with weights that a learner sends.

  Attributes:
    weights: The versions of the current learner's weights.
    most_bytes: The most bytes of the arrays of a message.
    drawn: How many parts have been drawn.
  """

  def __init__(self, run: Run):
    """`run` provides the sampler and the devices."""
    self._run = run
    leaves, self._tree = jax.tree.flatten(abstract_weights(run))
    self._wanted = leaves
    self.forget_weights()
    self._limits = contents.limits_of(run)
    self.most_bytes = max(sum(x.size * x.dtype.itemsize for x in leaves), _MOST_BYTES)
    stop = run.config.sampling.stop
    self._end = end_at(stop, run.tokenizer.decode) if stop else None
    self.drawn = 0

  def forget_weights(self) -> None:
    """Drops all versions of the weights, because a newly joined learner sends its own."""
    self.weights = KeptVersions(self._wanted)

  def draw(
    self,
    asked: Message,
    is_gone: threading.Event,
    replies: "queue.SimpleQueue[Message] | None" = None,
  ) -> Iterator[Finished | list[StoppedRow]]:
    """Draws a part.

    Args:
      asked: The message of kind "draw".
      is_gone: Set when the connection to the learner has ended.
      replies: The queue of messages of kind "go_on", which reply to paused rows.

    Yields:
      Groups that have ended, and lists of rows that pause.

    Raises:
      BadMessage: The message or a reply is invalid.
      ConnectionError: The connection has ended.
    """
    contents.check_draw(asked.fields, asked.arrays, self._limits)
    replies = replies or queue.SimpleQueue()
    fields, arrays = asked.fields, asked.arrays
    params = jax.tree.unflatten(self._tree, self.weights.use(fields.get("version")))

    def feed() -> tuple[Any, int]:  # the sampler calls it before each chunk
      if is_gone.is_set():
        raise ConnectionError("the connection has ended while a batch was drawn")
      return params, 0  # the version does not matter: the learner knows it

    filters = {name: x for name, x in fields["settings"].items() if name in FILTERS}
    others = {name: x for name, x in fields["settings"].items() if name not in FILTERS}
    settings = RowSettings(**others)
    sampler = self._run.programs.sampler(keeps_experts=fields["keeps_experts"])
    draws = Draws(
      jax.random.wrap_key_data(arrays["key"]),
      settings.with_filters(filters),
      first_prompt=fields["first_prompt"],
      turn_tokens=fields["turn_tokens"],
    )
    of_images = [name for name in arrays if name.startswith(IMAGES)]
    pixels = {name.removeprefix(IMAGES): arrays[name] for name in of_images}
    images = Images(**pixels) if pixels else None
    prompts = sampler.prompts(arrays["prompts_PS"], arrays["prompt_lengths_P"], images)
    left, members = len(prompts.lengths_n), fields["members"]
    # Only replies are checked with it, which needs no limit of completions (0).
    part = contents.PartRequest(left, prompts.tokens_nS.shape[1], members, 0, False)
    stream = sampler.stream(feed, left, members, self._end)
    requests = requests_of(prompts, members, draws)
    stream.submit([request._replace(pauses=fields["pauses"]) for request in requests])
    paused: set[tuple[int, int]] = set()
    while left:
      for row, tokens in self._replies(replies, part, paused, stream.draws, is_gone):
        stream.go_on(*row, tokens)
      news = stream.advance()
      if news.paused:
        paused.update((row.prompt, row.member) for row in news.paused)
        yield list(news.paused)
      for finished in news.finished:
        left -= len(finished.prompts)
        yield finished
    self.drawn += 1

  def paused(self, rows: Sequence[StoppedRow]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The fields and arrays of the message "paused" for these rows."""
    tokens_RT = np.zeros((len(rows), self._limits.tokens), np.int32)
    for place, row in enumerate(rows):
      tokens_RT[place, : len(row.tokens)] = row.tokens
    fields = [[row.prompt, row.member, len(row.tokens), row.stopped_by] for row in rows]
    return {"rows": fields}, {"tokens_RT": tokens_RT}

  def _replies(
    self,
    replies: "queue.SimpleQueue[Message]",
    part: contents.PartRequest,
    paused: set[tuple[int, int]],
    draws: bool,
    is_gone: threading.Event,
  ) -> Iterator[tuple[tuple[int, int], list[int] | None]]:
    """Yields ((prompt, member), tokens) for replies in `replies` that arrive soon.

    Waits for at least one if no row draws (`draws`). Removes rows with a reply from `paused`.
    Raises BadMessage for an invalid reply, and ConnectionError if the connection has ended.
    """
    until, found = time.monotonic() + SOON, False
    while paused:
      left = until - time.monotonic()
      if left <= 0 and (draws or found):
        return
      try:
        message = replies.get(timeout=SOON)
      except queue.Empty:
        if is_gone.is_set():
          raise ConnectionError("the connection has ended while a batch was drawn") from None
        continue
      contents.check_replies(message.fields, part, self._limits)
      for prompt, member, tokens in message.fields["rows"]:
        if (prompt, member) not in paused:
          raise BadMessage("it sent a reply to a row that does not pause")
        paused.remove((prompt, member))
        found = True
        yield (prompt, member), tokens


@contextlib.contextmanager
def _joined(
  address: tuple[str, int], access: Access, terms: dict[str, Any]
) -> Iterator[Connection]:
  """Yields a connection to a learner that has accepted this process. Closes it after the block.

  Raises ConfigError if secrets, certificates or terms do not match, and BadMessage or OSError if no
  learner answers at the address.
  """
  connection = Connection(handshake.join(address, access))
  try:
    connection.send("hello", {"terms": terms})
    answer = connection.receive(most_bytes=0)
    if answer.kind == "refused":
      raise ConfigError(f"the learner refuses this sampler: {_why(answer)}")
    if answer.kind != "welcome":
      raise BadMessage(f"it answered with a message of kind {answer.kind[:20]!r}")
    yield connection
  finally:
    connection.end()
    connection.close()


def _draw_until_ended(connection: Connection, drawer: Drawer) -> None:
  """Draws all parts that arrive. Returns when the learner says that its run has ended."""
  # Needs no limit: a learner sends the next part only after it has received the last one.
  inbox, is_gone = queue.SimpleQueue[Message | Exception](), threading.Event()
  drawer.forget_weights()
  replies = queue.SimpleQueue[Message]()
  arguments = connection, drawer.weights, drawer.most_bytes, inbox, replies, is_gone
  threading.Thread(target=_receive, args=arguments, daemon=True).start()
  threading.Thread(target=_beat, args=(connection, is_gone), daemon=True).start()
  while True:
    message = inbox.get()
    if isinstance(message, Exception):
      raise message
    if message.kind == "ended":
      return
    if message.kind == "refused":
      raise RunFailed(f"the learner sent this sampler away: {_why(message)}")
    if message.kind == "draw":
      try:
        for news in drawer.draw(message, is_gone, replies):
          if isinstance(news, Finished):
            connection.send("finished", {"prompts": news.prompts}, given(news.completions))
          else:
            connection.send("paused", *drawer.paused(news))
      except ConnectionError:
        connection.end()  # the next item in `inbox` says why the connection has ended
    else:
      raise BadMessage(f"it sent a message of kind {message.kind[:20]!r}")


def _why(message: Message) -> str:
  """The reason in a message "refused", as one line."""
  return " ".join(str(message.fields.get("why")).split())[:500]


def _receive(
  connection: Connection,
  weights: KeptVersions,
  most_bytes: int,
  inbox: "queue.SimpleQueue[Message | Exception]",
  replies: "queue.SimpleQueue[Message]",
  is_gone: threading.Event,
) -> None:
  """Receives messages in a thread, until the connection has ended.

  Weights go to `weights`, and "go_on" messages to `replies`. All others, except "alive", go to
  `inbox`, as does the error that ends the connection. `is_gone` is set once the learner needs no
  more completions, because the run or the connection has ended.
  """

  def check(kind: str, fields: dict[str, Any], shapes: Shapes) -> None:
    # Messages of other kinds are checked where they are used.
    if kind == "weights":
      weights.check(fields, shapes)

  try:
    while True:
      message = connection.receive(most_bytes, check)
      if message.kind == "weights":
        weights.take(message.fields, message.arrays)
      elif message.kind == "go_on":
        replies.put(message)
      elif message.kind != "alive":
        if message.kind in ("ended", "refused"):
          is_gone.set()
        inbox.put(message)
      del message  # frees the weights, which are large, while it waits
  except Exception as error:  # the main thread raises it, from `inbox`
    is_gone.set()
    inbox.put(error)


def _beat(connection: Connection, is_gone: threading.Event) -> None:
  """Sends "alive" messages in a thread, even while the process draws or receives weights."""
  with contextlib.suppress(OSError):  # the receiving thread reports the error
    while not is_gone.wait(BEAT):
      connection.send("alive")
