"""The engine: a thread that decodes the rows of many requests together.

Between two chunks, the engine takes new weights, seats waiting rows, and removes rows that have
ended or were cancelled. While the devices decode a chunk, it reports the tokens of the previous
chunk to the rows' listeners.

The tokens of a row depend only on its prompt, its settings, its number, which determines the random
numbers, and the weights. In float32, they do not depend on the other rows.
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
  likely_tokens,
)
from grpo_jax.serving.device_flight import Sizes
from grpo_jax.serving.images import SeenImages

MOST_BIASED = 300  # the most tokens of a row with a bias


class Full(Exception):
  """The queue of waiting rows is full."""


class Closed(Exception):
  """The engine was closed or has failed, and accepts no rows."""


class AnswerPart(NamedTuple):
  """The tokens that a row drew in a chunk.

  Attributes:
    tokens: The token ids, including the one that ended the row.
    logprobs: Under softmax(logits / temperature), or softmax(logits) at temperature 0.
    version: The version of the weights that wrote the tokens.
    finish: "" while the row goes on, "stop" after a stop id or stop text, "length" at the limit,
      "closed" if the engine ended first, "failed" if the images could not be encoded.
    computed: How many tokens of the prompt were computed. 0 after the first part.
    alternatives: The likeliest tokens at the position of each token, if the job requests any.
    scores: The log-probs of the prompt's tokens, in the first part of a job with `is_scored`.
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
    number: An int32 that alone determines the random numbers.
    settings: Temperature, filters and limits, as numbers. None is off.
    hear: Called in the engine's thread with each part of the completion. It must not block.
    end: Cuts the row at stop texts (see sampler/stop.py), or None.
    guide: Restricts the tokens that may be drawn, or None.
    alternatives: How many of the likeliest tokens to return for each drawn token and, with
      `is_scored`, for each prompt token.
    bias: Token id -> number to add to its logit, for at most `MOST_BIASED` tokens.
    is_scored: Whether to return the log-probs of the prompt's tokens.
    images: The images of the prompt, or None.
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
  """The handle of a submitted job, for `Engine.cancel`."""

  def __init__(self, job: Job):
    """Starts without tokens."""
    self.job = job
    self.tokens: list[int] = []
    self.is_cancelled = self.is_seated = False  # seated: its whole prompt is computed


class Engine:
  """Decodes rows. Every method may be called from any thread.

  Attributes:
    sizes: The limits.
    max_tokens: T, the longest completion.
    counts: Statistics since the engine was made.
    failure: The error that ended the engine's thread, or None.
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
      version: The version number of these weights, which answers repeat.
    """
    self.sizes, self.max_tokens, self.counts = sizes, decoding.max_tokens, Counts()
    self.failure: BaseException | None = None
    self._decoder = Decoder(config, decoding, sizes, self.counts)
    self._params, self._version = params, version
    self._changed = threading.Condition()
    self._next_weights: tuple[model.Params, int] | None = None
    self._waiting: deque[Row] = deque()
    self._seats: list[Row | None] = [None] * sizes.rows
    self._untold: list[tuple[Row, AnswerPart]] = []  # parts that listeners do not have yet
    self._is_closed = False
    self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

  def start(self) -> None:
    """Compiles every program, and then starts the thread that decodes."""
    self._decoder.compile(self._params)
    self._thread.start()

  @property
  def version(self) -> int:
    """The version of the weights that write the next tokens."""
    return self._version

  @property
  def filters(self) -> Mapping[str, Filter]:
    """The filters that rows may use: those that were registered when the engine was made."""
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
    """Whether the engine accepts rows."""
    return self._thread.is_alive() and not self._is_closed

  def submit(self, jobs: Sequence[Job]) -> list[Row]:
    """Queues jobs for seats, in order.

    Raises:
      Full: The queue has no room for all of them. None was queued.
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
    """Drops rows. Waiting rows leave at once, rows in flight after the chunk."""
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
      params: All parameters, with the shapes and dtypes of the old ones.
      version: The version number of these weights.

    Raises:
      ValueError: The shapes or dtypes differ.
      Closed: The engine was closed, or it failed.
    """
    if _shapes(params) != _shapes(self._params):
      raise ValueError("the new weights have other shapes or dtypes than those of the engine")
    with self._changed:
      self._next_weights = params, version
      self._changed.notify_all()
      while self._next_weights is not None:
        if not self.is_open:
          raise Closed
        self._changed.wait(0.1)

  def close(self) -> None:
    """Ends the thread and all rows, whose listeners get a part with the finish "closed"."""
    with self._changed:
      self._is_closed = True
      self._changed.notify_all()
    if self._thread.is_alive():
      self._thread.join()

  def _run(self) -> None:
    try:
      while self._between_chunks():
        self._chunk()
    except BaseException as error:  # whatever it is, listeners must learn that their rows ended
      self.failure = error
    with self._changed:
      self._is_closed = True
      left = [row for row in self._seats if row is not None] + [*self._waiting]
      self._waiting.clear()
      self._changed.notify_all()
    self._untold += [(row, AnswerPart([], [], self._version, "closed")) for row in left]
    self._tell()

  def _between_chunks(self) -> bool:
    """Takes new weights, and waits until there is a row. Returns False if the engine is closed."""
    if not self.in_flight:  # otherwise the next chunk reports the parts while devices decode
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
    """Seats waiting rows, decodes a chunk, and queues its tokens for `_tell`."""
    start = time.monotonic()
    with self._changed:
      free = [place for place, row in enumerate(self._seats) if row is None]
      new = {place: self._waiting.popleft() for place in free[: len(self._waiting)]}
      for place, row in new.items():
        self._seats[place] = row
      leaves_early = bool(self._waiting)
    seats = [*enumerate(self._seats)]
    draws = any(row is not None and row.is_seated for _, row in seats)
    new_rows = {place: _new_row(row.job) for place, row in new.items()}
    computed, failed = self._decoder.seat(new_rows, self._params, in_pieces=draws)
    for place in computed:
      self._seats[place].is_seated = True
    going = {place: row for place, row in seats if row is not None and row.is_seated}
    # A row with max_tokens = 0 only computes the scores of its prompt.
    taken_R = np.array(
      [place in going and row.job.settings.max_tokens != 0 for place, row in seats]
    )
    longest = max((len(row.tokens) for row in going.values()), default=0)
    results = self._decoder.chunk(self._params, taken_R, longest, leaves_early, self._extras())
    self._tell()  # the tokens of the previous chunk, while the devices decode this one
    drawn, goes_on_R = jax.device_get(results)
    scores = self._decoder.take_scores({place: row.job.alternatives for place, row in new.items()})
    ended: dict[int, EndedRow] = {}
    for place, row in seats:
      if row is None:
        continue
      if place not in going and place not in failed:  # its prompt is not complete yet
        if row.is_cancelled:
          self._decoder.drop(place)
          self._seats[place] = None
        continue
      drawn_N = drawn.is_drawn_RN[place]
      tokens, logprobs = drawn.tokens_RN[place, drawn_N], drawn.logprobs_RN[place, drawn_N]
      finish = "" if goes_on_R[place] else "stop" if drawn.stopped_by_R[place] >= 0 else "length"
      finish = "failed" if place in failed else finish
      # A stop text may cut tokens off, so `part` may have fewer than the row drew.
      part = self._part(row, tokens.tolist(), logprobs.tolist(), finish)
      part = part._replace(
        computed=computed.get(place, 0),
        alternatives=_alternatives(row.job, drawn, place)[: len(part.tokens)],
        scores=scores.get(place),
      )
      if part.tokens or part.finish:
        self._untold.append((row, part))
      if part.finish and row.tokens:  # without tokens, there is no text but the prompt
        ended[place] = EndedRow(row.tokens, is_cut=len(part.tokens) < len(tokens))
      if part.finish or row.is_cancelled:
        self._seats[place] = None
    self._decoder.keep(ended)
    self.counts.chunks += 1
    self.counts.seconds += time.monotonic() - start

  def _extras(self) -> Extras | None:
    """Masks, biases and alternatives for the next draw. None if no row needs any."""
    jobs = [row.job if row is not None and row.is_seated else None for row in self._seats]
    guides = [job.guide if job else None for job in jobs]
    biases = [job.bias if job else {} for job in jobs]
    has_alternatives = any(job and job.alternatives for job in jobs)
    if not (any(guides) or any(biases) or has_alternatives):
      return None
    extras = Extras(alternatives=self._decoder.alternatives if has_alternatives else 0)
    vocabulary = self._decoder.vocabulary
    if any(guides):
      # -1 sets all bits: rows without a guide may draw all tokens.
      allowed_RW = np.full((len(jobs), -(-vocabulary // 32)), -1, np.int32)
      for bits_W, guide in zip(allowed_RW, guides, strict=True):
        if guide:
          guide.fill(bits_W)
      extras = extras.replace(allowed_RW=allowed_RW)
    if any(biases):
      biased_RN = np.full((len(jobs), MOST_BIASED), vocabulary, np.int32)  # V is padding
      bias_RN = np.zeros((len(jobs), MOST_BIASED), np.float32)
      for place, bias in enumerate(biases):
        biased_RN[place, : len(bias)], bias_RN[place, : len(bias)] = [*bias], [*bias.values()]
      extras = extras.replace(biased_RN=biased_RN, bias_RN=bias_RN)
    return extras

  def _part(self, row: Row, tokens: list[int], logprobs: list[float], finish: str) -> AnswerPart:
    """Appends drawn tokens to a row, cuts it after a stop text, and returns the new tokens.

    `finish` is the reason from the devices, which a stop text or a guide may override.
    """
    before = len(row.tokens)
    row.tokens += tokens
    kept = row.job.end(row.tokens, before) if row.job.end and tokens else None
    guide = row.job.guide if tokens else None
    if kept is not None:
      del row.tokens[kept:], logprobs[kept - before :]
      finish = "stop"
    elif guide and (finish == "stop" or (not finish and not guide.take(tokens))):
      # No token may follow: the form is complete, or its grammar has become too large. Such a
      # grammar allows only a stop id or takes no token, so the answer is incomplete as at a limit.
      finish = "stop" if guide.is_whole else "length"
    self.counts.tokens += len(row.tokens) - before
    self.counts.rows += bool(finish)
    return AnswerPart(row.tokens[before:], logprobs, self._version, finish)

  def _tell(self) -> None:
    """Reports new parts to listeners. Cancels rows whose event loop is closed."""
    for row, part in self._untold:
      if not row.is_cancelled:
        try:
          row.job.hear(part)
        except RuntimeError:  # the listener's server has ended
          row.is_cancelled = True
    self._untold.clear()


def _new_row(job: Job) -> NewRow:
  return NewRow(job.prompt, job.number, job.settings, job.is_scored, job.images)


def _alternatives(job: Job, drawn: Drawn, place: int) -> list[Likely]:
  """The likeliest tokens for each token that a row drew, as many as the job requests."""
  if not job.alternatives:
    return []
  own_N, count = drawn.is_drawn_RN[place], slice(job.alternatives)
  tokens_TA = drawn.alternatives_RNA[place, own_N, count]
  logprobs_TA = drawn.alternative_logprobs_RNA[place, own_N, count]
  return [likely_tokens(*pair) for pair in zip(tokens_TA, logprobs_TA, strict=True)]


def _shapes(params: model.Params) -> Any:
  leaves, tree = jax.tree.flatten(params)
  return tree, [(leaf.shape, leaf.dtype) for leaf in leaves]
