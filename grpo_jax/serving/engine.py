"""The engine: rows of many requests are decoded together, in a thread of its own.

Between two chunks, it takes new weights and seats rows that wait. Rows that have ended or that
nobody wants any more leave. While the devices decode a chunk, it tells the listeners of the rows
what these have drawn in the one before.

A row's tokens depend on its prompt, its settings, its number and the weights alone. The number
decides the random numbers. In float32, the rows beside it change no token.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import threading
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax import model
from grpo_jax.sampler.filters import Filter
from grpo_jax.sampler.guides import Guided
from grpo_jax.sampler.logits import Decoding, RowSettings
from grpo_jax.sampler.rows import Drawn, Extras
from grpo_jax.sampler.stop import End
from grpo_jax.serving.decoder import (
  Counts,
  Decoder,
  EndedRow,
  Likely,
  NewRow,
  PromptScores,
  Sizes,
  likely_tokens,
)
from grpo_jax.serving.images import SeenImages

MOST_BIASED = 300  # tokens of a row that have a bias


class Full(Exception):
  """As many rows wait as may wait."""


class Closed(Exception):
  """The engine takes no rows any more."""


class AnswerPart(NamedTuple):
  """The tokens that a row drew in a chunk.

  Attributes:
    tokens: With the one that ended the row.
    logprobs: Under softmax(logits / temperature). At temperature 0, of temperature 1.
    version: The version of the weights that wrote the tokens.
    finish: "" while the row goes on, "stop" after a stop id or a text that ends it, "length" at
      its limit, "closed" if the engine ended first, and "failed" if its images could not be
      encoded.
    computed: How many tokens of the prompt were computed for it. 0 after the first part.
    alternatives: For each of the tokens, the likeliest ones in its place, if the job asks for any.
    scores: The log-probs of the prompt's tokens, in the first part of a job that asks for them.
  """

  tokens: list[int]
  logprobs: list[float]
  version: int
  finish: str
  computed: int = 0
  alternatives: Sequence[Likely] = ()
  scores: PromptScores | None = None


@dataclasses.dataclass(frozen=True)
class Job:
  """A completion to write.

  Attributes:
    prompt: Token ids, at least one and at most `Sizes.prompt_tokens`.
    number: An int32 on which the random numbers depend, and they depend on nothing else.
    settings: Temperature, filters and limits, as numbers. None is off.
    hear: Called in the engine's thread with each part of the completion. It must return at once.
    end: Ends the row at texts, as `sampler.stop.end_at` returns it, or None.
    guide: Says which tokens it may draw, or None.
    alternatives: How many of the likeliest tokens to return in the place of each that is drawn and,
      with `is_scored`, of each of the prompt.
    bias: The numbers to add to the logits of tokens, at most `MOST_BIASED` of them.
    is_scored: Whether to return the log-probs of the prompt's tokens.
    images: The images of the prompt. None: there are none.
  """

  prompt: tuple[int, ...]
  number: int
  settings: RowSettings
  hear: Callable[[AnswerPart], None]
  end: End | None = None
  guide: Guided | None = None
  alternatives: int = 0
  bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
  is_scored: bool = False
  images: SeenImages | None = None


class Row:
  """A job that waits or is decoded. `Engine.submit` returns it, and `Engine.cancel` takes it."""

  def __init__(self, job: Job):
    """It has drawn nothing yet."""
    self.job = job
    self.tokens: list[int] = []
    self.is_cancelled = False


class Engine:
  """Decodes rows. Every method may be called from any thread.

  Attributes:
    sizes: Its limits.
    max_tokens: T, the longest completion.
    counts: Counts of what it has done.
    failure: The error that ended it, or None.
  """

  def __init__(
    self,
    config: model.ModelConfig,
    decoding: Decoding,
    sizes: Sizes,
    params: model.Params,
    version: int = 0,
  ):
    """Compiles nothing yet.

    Args:
      config: The model, in the dtype of sampling.
      decoding: Stop ids and the longest completion.
      sizes: The limits.
      params: All parameters, as `Parameters.for_sampling` returns them.
      version: A name for these weights.
    """
    self.sizes, self.max_tokens, self.counts = sizes, decoding.max_tokens, Counts()
    self.failure: BaseException | None = None
    self._decoder = Decoder(config, decoding, sizes, self.counts)
    self._params, self._version = params, version
    self._changed = threading.Condition()
    self._next_weights: tuple[model.Params, int] | None = None
    self._waiting: deque[Row] = deque()
    self._seats: list[Row | None] = [None] * sizes.rows
    self._untold: list[tuple[Row, AnswerPart]] = []
    self._is_closed = False
    self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

  def start(self) -> None:
    """Compiles every program, then takes rows. Returns when the programs are compiled."""
    self._decoder.compile(self._params)
    self._thread.start()

  @property
  def version(self) -> int:
    """The version of the weights that write the next tokens."""
    return self._version

  @property
  def filters(self) -> Mapping[str, Filter]:
    """The filters that rows may have. One that is registered later is none of them."""
    return self._decoder.filters

  @property
  def waiting(self) -> int:
    """How many rows wait."""
    return len(self._waiting)

  @property
  def in_flight(self) -> int:
    """How many rows are being decoded."""
    return sum(row is not None for row in self._seats)

  @property
  def is_open(self) -> bool:
    """Whether it takes rows."""
    return self._thread.is_alive() and not self._is_closed

  def submit(self, jobs: Sequence[Job]) -> list[Row]:
    """Lets jobs wait for seats, in their order.

    Raises:
      Full: Not all of them may wait. None does.
      Closed: The engine was closed, or it failed.
    """
    with self._changed:
      if not self.is_open:
        raise Closed
      if len(self._waiting) + len(jobs) > self.sizes.waiting:
        raise Full
      rows = [Row(job) for job in jobs]
      self._waiting.extend(rows)
      self._changed.notify_all()
    return rows

  def cancel(self, rows: Sequence[Row]) -> None:
    """Drops rows that nobody wants any more. Those that have ended stay as they are.

    A row that is decoded leaves its seat after a chunk.
    """
    with self._changed:
      for row in rows:
        row.is_cancelled = True
      self._waiting = deque(row for row in self._waiting if not row.is_cancelled)
      self._changed.notify_all()

  def set_weights(self, params: model.Params, version: int) -> None:
    """Replaces the weights between two chunks, and returns when that is done.

    Rows in flight go on. Their prompts and earlier tokens keep the keys and values that the old
    weights computed.

    Args:
      params: As those that the engine was made with.
      version: A name for them.

    Raises:
      ValueError: They have other shapes.
      Closed: The engine was closed, or it failed.
    """
    if _shapes(params) != _shapes(self._params):
      raise ValueError("the new weights have other shapes than those of the engine")
    with self._changed:
      self._next_weights = params, version
      self._changed.notify_all()
      while self._next_weights is not None:
        if not self.is_open:
          raise Closed
        self._changed.wait(0.1)

  def close(self) -> None:
    """Ends all rows, and the thread. Their listeners hear "closed"."""
    with self._changed:
      self._is_closed = True
      self._changed.notify_all()
    if self._thread.is_alive():
      self._thread.join()

  def _run(self) -> None:
    try:
      while self._between_chunks():
        self._chunk()
    except BaseException as error:  # whatever it is, the rows end and their listeners hear of it
      self.failure = error
    with self._changed:
      self._is_closed = True
      left = [row for row in self._seats if row is not None] + [*self._waiting]
      self._waiting.clear()
      self._changed.notify_all()
    self._untold += [(row, AnswerPart([], [], self._version, "closed")) for row in left]
    self._tell()

  def _between_chunks(self) -> bool:
    """Waits until there is something to decode. Returns False once the engine was closed."""
    if not self.in_flight:
      self._tell()
    with self._changed:
      while True:
        if self._is_closed:
          return False
        if self._next_weights is not None:
          (self._params, self._version), self._next_weights = self._next_weights, None
          self._decoder.forget_prompts()
          self._changed.notify_all()
        if self._waiting or self.in_flight:
          return True
        self._changed.wait()

  def _chunk(self) -> None:
    """Seats the rows that wait, and decodes a chunk."""
    start = time.monotonic()
    with self._changed:
      free = [place for place, row in enumerate(self._seats) if row is None]
      new = {place: self._waiting.popleft() for place in free[: len(self._waiting)]}
      for place, row in new.items():
        self._seats[place] = row
      leaves_early = bool(self._waiting)
    seated = {place: _new_row(row.job) for place, row in new.items()}
    computed = self._decoder.seat(seated, self._params)
    failed = new.keys() - computed.keys()
    longest = max(len(row.tokens) for row in self._seats if row is not None)
    # A row of no tokens is there for its prompt alone.
    taken_R = np.array(
      [
        row is not None and row.job.settings.max_tokens != 0 and place not in failed
        for place, row in enumerate(self._seats)
      ]
    )
    seen = self._decoder.chunk(self._params, taken_R, longest, leaves_early, self._extras())
    self._tell()
    drawn, goes_on_R = jax.device_get(seen)
    scores = self._decoder.take_scores({place: row.job.alternatives for place, row in new.items()})
    ended: dict[int, EndedRow] = {}
    for place, row in enumerate(self._seats):
      if row is None:
        continue
      own = drawn.is_drawn_RN[place]
      tokens, logprobs = drawn.tokens_RN[place, own], drawn.logprobs_RN[place, own]
      finish = "" if goes_on_R[place] else "stop" if drawn.stopped_by_R[place] >= 0 else "length"
      finish = "failed" if place in failed else finish
      part = self._part(row, tokens.tolist(), logprobs.tolist(), finish)
      part = part._replace(
        computed=computed.get(place, 0),
        alternatives=_alternatives(row.job, drawn, place)[: len(part.tokens)],
        scores=scores.get(place),
      )
      if part.tokens or part.finish:
        self._untold.append((row, part))
      if part.finish and row.tokens:
        ended[place] = EndedRow(row.tokens, is_cut=len(part.tokens) < len(tokens))
      if part.finish or row.is_cancelled:
        self._seats[place] = None
    self._decoder.keep(ended)
    self.counts.chunks += 1
    self.counts.seconds += time.monotonic() - start

  def _extras(self) -> Extras | None:
    """The other parts of the next draw. None where no row needs any."""
    jobs = [None if row is None else row.job for row in self._seats]
    guides = [job.guide if job else None for job in jobs]
    biases = [job.bias if job else {} for job in jobs]
    asks = any(job and job.alternatives for job in jobs)
    if not (any(guides) or any(biases) or asks):
      return None
    extras = Extras(alternatives=self._decoder.alternatives if asks else 0)
    vocabulary = self._decoder.vocabulary
    if any(guides):
      allowed_RW = np.full((len(jobs), -(-vocabulary // 32)), -1, np.int32)
      for bits_W, guide in zip(allowed_RW, guides, strict=True):
        if guide:
          guide.fill(bits_W)
      extras = extras.replace(allowed_RW=allowed_RW)
    if any(biases):
      biased_RN = np.full((len(jobs), MOST_BIASED), vocabulary, np.int32)
      bias_RN = np.zeros((len(jobs), MOST_BIASED), np.float32)
      for place, bias in enumerate(biases):
        biased_RN[place, : len(bias)], bias_RN[place, : len(bias)] = [*bias], [*bias.values()]
      extras = extras.replace(biased_RN=biased_RN, bias_RN=bias_RN)
    return extras

  def _part(self, row: Row, tokens: list[int], logprobs: list[float], finish: str) -> AnswerPart:
    """The tokens that a row has drawn, up to a text that ends it."""
    seen = len(row.tokens)
    row.tokens += tokens
    kept = row.job.end(row.tokens, seen) if row.job.end and tokens else None
    guide = row.job.guide if tokens else None
    if kept is not None:
      del row.tokens[kept:], logprobs[kept - seen :]
      finish = "stop"
    elif guide and (finish == "stop" or not finish and not guide.take(tokens)):
      # Nothing may follow: the form is whole, or its grammar has become too large.
      finish = "stop" if guide.is_whole else "length"
    self.counts.tokens += len(row.tokens) - seen
    self.counts.rows += bool(finish)
    return AnswerPart(row.tokens[seen:], logprobs, self._version, finish)

  def _tell(self) -> None:
    """Tells listeners. One may be gone, as after its server has ended: then its row leaves."""
    for row, part in self._untold:
      if not row.is_cancelled:
        try:
          row.job.hear(part)
        except RuntimeError:  # its event loop is closed
          row.is_cancelled = True
    self._untold.clear()


def _new_row(job: Job) -> NewRow:
  return NewRow(job.prompt, job.number, job.settings, job.is_scored, job.images)


def _alternatives(job: Job, drawn: Drawn, place: int) -> list[Likely]:
  """The likeliest tokens in the place of each that a row has drawn, as many as it wants."""
  if not job.alternatives:
    return []
  own_N, count = drawn.is_drawn_RN[place], slice(job.alternatives)
  tokens_TA = drawn.alternatives_RNA[place, own_N, count]
  logprobs_TA = drawn.alternative_logprobs_RNA[place, own_N, count]
  return [likely_tokens(*pair) for pair in zip(tokens_TA, logprobs_TA, strict=True)]


def _shapes(params: model.Params) -> Any:
  leaves, tree = jax.tree.flatten(params)
  return tree, [(leaf.shape, leaf.dtype) for leaf in leaves]
