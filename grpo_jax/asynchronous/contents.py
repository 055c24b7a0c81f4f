"""Checks every field and array of the messages, on both sides.

The learner knows the shape of each array in a valid answer, and a sampler knows the shapes of the
weights of its config. Neither side allocates memory for other shapes, or accepts invalid values.
"""

from collections.abc import Callable, Mapping, Sequence
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax.asynchronous.messages import BadMessage, Shapes
from grpo_jax.run.run import Run
from grpo_jax.sampler.filters import FILTERS
from grpo_jax.sampler.logits import RowSettings
from grpo_jax.sampler.requests import StoppedRow
from grpo_jax.settings import shown
from grpo_jax.types import Completions, Images

IMAGES = "images."  # the names of image arrays begin with this
_SETTINGS = {*RowSettings.__dataclass_fields__} - {"own"}  # filters in `own` are sent by name
_ROUNDING = 1e-3  # rounding may raise a log-prob above 0 by this much
_MOST = 2**31  # numbers in a field must be below it


class CompletionLimits(NamedTuple):
  """The limits on completions of a run.

  Attributes:
    vocabulary: The size of the vocabulary.
    tokens: T, the length of the longest completion.
    experts: X, the number of experts of a layer.
    experts_in_all: Y, how many experts a token uses in all layers together.
    experts_dtype: The dtype of the numbers of experts.
  """

  vocabulary: int
  tokens: int
  experts: int = 0
  experts_in_all: int = 0
  experts_dtype: str = "int8"


class PartRequest(NamedTuple):
  """The sizes of a part of a sampling call, which one process draws.

  Attributes:
    prompts: The number of prompts.
    prompt_tokens: S, the padded length of the prompts.
    members: G, the number of completions of each prompt.
    longest: The most tokens of a completion, at most `CompletionLimits.tokens`.
    keeps_experts: Whether completions include the experts of each token.
    pauses: Whether rows that have ended wait for a reply.
  """

  prompts: int
  prompt_tokens: int
  members: int
  longest: int
  keeps_experts: bool
  pauses: bool = False


def limits_of(run: Run) -> CompletionLimits:
  """The limits on completions of a run."""
  shape = run.parameters.sampling.model
  return CompletionLimits(
    vocabulary=shape.vocab_size,
    tokens=run.config.sampling.max_tokens,
    experts=shape.num_experts,
    experts_in_all=shape.experts_in_all,
    experts_dtype=shape.experts_dtype,
  )


def check_answer(
  fields: Mapping[str, Any], shapes: Shapes, part: PartRequest, limits: CompletionLimits
) -> None:
  """Checks a process's message with completions before its arrays are read.

  Args:
    fields: The fields of the message.
    shapes: The dtypes and shapes of the arrays of the message.
    part: The part that the process draws.
    limits: The limits on completions of the run.

  Raises:
    BadMessage: A field or an array is invalid. The text names it.
  """
  numbers, in_part = fields.get("prompts"), range(part.prompts)
  if not isinstance(numbers, list) or not all(type(n) is int and n in in_part for n in numbers):
    raise BadMessage("it sent completions of prompts that it did not get")
  if len({*numbers}) < len(numbers):
    raise BadMessage("it sent completions of a prompt twice")
  _check_shapes(shapes, _answer(len(numbers), part, limits), "completions")


def check_paused(
  fields: Mapping[str, Any], shapes: Shapes, part: PartRequest, limits: CompletionLimits
) -> None:
  """Checks a message "paused" before its arrays are read. Raises BadMessage, which says why."""
  rows = fields.get("rows")
  if not part.pauses or not isinstance(rows, list) or not rows:
    raise BadMessage("it sent rows that pause, and none may")
  if len(rows) > part.prompts * part.members or not all(map(_is_row, rows)):
    raise BadMessage("it sent rows that pause, and not as it must")
  _check_shapes(shapes, {"tokens_RT": (np.dtype(np.int32), (len(rows), limits.tokens))}, "rows")


def paused(
  fields: Mapping[str, Any],
  arrays: Mapping[str, np.ndarray],
  part: PartRequest,
  limits: CompletionLimits,
) -> list[StoppedRow]:
  """Reads the rows in a message "paused", which `check_paused` has accepted.

  A row pauses after a turn, and keeps its seat until it gets a reply.

  Raises:
    BadMessage: A row or its tokens are invalid. The text says why.
  """
  found = []
  for (prompt, member, length, stopped_by), tokens_T in zip(fields["rows"], arrays["tokens_RT"]):
    if prompt >= part.prompts or member >= part.members or not 1 <= length <= part.longest:
      raise BadMessage("it sent rows that pause, and did not get them, or not at this length")
    _check_range("tokens_RT", tokens_T, 0, limits.vocabulary - 1)
    tokens = tokens_T[:length].tolist()
    if stopped_by not in (-1, tokens[-1]):  # -1: a limit ended the turn
      raise BadMessage("it sent a row that pauses after another token than its last one")
    room = part.longest - length
    found.append(
      StoppedRow(prompt=prompt, member=member, tokens=tokens, stopped_by=stopped_by, room=room)
    )
  return found


def _is_row(row: Any) -> bool:
  """Whether a value is [prompt, member, length, stopped_by] as integers."""
  return (
    isinstance(row, list) and len(row) == 4 and all(map(_is_whole, row[:3])) and type(row[3]) is int
  )


def check_replies(fields: Mapping[str, Any], part: PartRequest, limits: CompletionLimits) -> None:
  """Checks a learner's message "go_on", with replies to rows. Raises BadMessage, which says why."""
  rows = fields.get("rows")
  if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == 3 for row in rows):
    raise BadMessage("it sent replies that make no sense")
  for prompt, member, tokens in rows:
    if not (_is_whole(prompt) and _is_whole(member)):
      raise BadMessage("it sent a reply to no row")
    if prompt >= part.prompts or member >= part.members:
      raise BadMessage("it sent a reply to a row that does not exist")
    is_list = isinstance(tokens, list) and all(map(_is_whole, tokens))
    if tokens is not None and not (is_list and max(tokens, default=0) < limits.vocabulary):
      raise BadMessage("it sent a reply that is no list of tokens")


# The replies to a row: (length of the row when it paused, tokens of the reply or None to end it).
Replies = list[tuple[int, list[int] | None]]


def completions(
  arrays: Mapping[str, np.ndarray],
  part: PartRequest,
  limits: CompletionLimits,
  replies: Sequence[Sequence[Replies]] = (),
) -> Completions:
  """Reads the completions in a message that `check_answer` has accepted, and checks all values.

  Args:
    arrays: The arrays of the message, by the names of the fields of `Completions`.
    part: The part that the process draws.
    limits: The limits on completions of the run.
    replies: The replies to each row, by group and member. Empty if there are none.

  Raises:
    BadMessage: The values cannot be completions that a sampler draws. The text names the array.
  """
  made = Completions(**arrays)
  lengths_PG, tokens_PGT = made.lengths_PG, made.tokens_PGT
  _check_range("lengths_PG", lengths_PG, 1, part.longest)
  is_token_PGT = np.arange(limits.tokens) < lengths_PG[..., None]
  is_given_PGT = np.zeros_like(is_token_PGT)
  for p, group_replies in enumerate(replies):
    for g, row_replies in enumerate(group_replies):
      # A row that can pause ends only with the reply None.
      if part.pauses and not (row_replies and row_replies[-1][1] is None):
        raise BadMessage("it sent a row that was not told to end")
      for length, tokens in row_replies:
        after = slice(length, length + len(tokens or ()))
        # A reply that leaves no room for further tokens ends the row and is not appended.
        if tokens and after.stop < part.longest:
          is_given_PGT[p, g, after] = True
          if tokens_PGT[p, g, after].tolist() != tokens:
            raise BadMessage("it sent tokens_PGT without the replies that it got")
  if (made.sampled_PGT != is_token_PGT & ~is_given_PGT).any():
    raise BadMessage("it sent sampled_PGT that is not true for exactly the tokens of each row")
  _check_range("tokens_PGT", tokens_PGT, 0, limits.vocabulary - 1)
  for name in ("tokens_PGT", "logprobs_PGT", "behavior_logprobs_PGT"):
    if arrays[name][~is_token_PGT].any():
      raise BadMessage(f"it sent {name} that is not 0 at padding")
  for name in ("logprobs_PGT", "behavior_logprobs_PGT"):
    wrong = ~(np.isfinite(arrays[name]) & (arrays[name] <= _ROUNDING))
    if wrong.any():
      raise BadMessage(f"it sent {name} with {arrays[name][wrong][0]}, which is no log-prob")
  last_PG = np.take_along_axis(tokens_PGT, lengths_PG[..., None] - 1, -1)[..., 0]
  # -1: a limit ended the row: `longest`, or if rows pause perhaps the limit on a turn.
  is_cut_PG = (made.stopped_by_PG == -1) & (part.pauses | (lengths_PG == part.longest))
  if not (is_cut_PG | (made.stopped_by_PG == last_PG)).all():
    raise BadMessage("it sent stopped_by_PG that is not the last token of each row that has ended")
  for name in ("experts_PGTY", "prompt_experts_PSY"):
    if name in arrays:
      _check_range(name, arrays[name], -1, limits.experts - 1)
  return made


def are_finite(arrays: list[np.ndarray]) -> bool:
  """Whether all values in floating-point arrays are finite."""
  floats = [x for x in arrays if jax.numpy.issubdtype(x.dtype, np.floating)]
  return all(np.isfinite(x.astype(np.float32)).all() for x in floats)


def check_draw(
  fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray], limits: CompletionLimits
) -> None:
  """Checks a learner's message "draw". Raises BadMessage, which names the field or the array."""
  _check_field(fields, "members", lambda x: _is_whole(x) and x > 0)
  _check_field(fields, "first_prompt", _is_whole)
  _check_field(fields, "keeps_experts", lambda x: isinstance(x, bool))
  _check_field(fields, "pauses", lambda x: isinstance(x, bool))
  _check_field(fields, "turn_tokens", _is_whole)
  _check_field(fields, "settings", lambda x: isinstance(x, dict))
  for name, value in fields["settings"].items():
    is_number = type(value) in (int, float) and 0 <= value < math.inf
    if name not in _SETTINGS | {*FILTERS} or not is_number:
      raise BadMessage(f"it sent settings with {shown(name)} of {shown(value)}")
  prompts, lengths = arrays.get("prompts_PS"), arrays.get("prompt_lengths_P")
  for name, array, axes in (("prompts_PS", prompts, 2), ("prompt_lengths_P", lengths, 1)):
    if array is None or array.ndim != axes or array.dtype.kind != "i" or not array.size:
      raise BadMessage(f"it sent no {name}, or not as integers with {axes} axes")
  P, S = prompts.shape
  key = np.asarray(jax.random.key_data(jax.random.key(0)))  # for its dtype and shape
  wanted: Shapes = {
    "prompts_PS": (prompts.dtype, (P, S)),
    "prompt_lengths_P": (lengths.dtype, (P,)),
    "key": (key.dtype, key.shape),
  }
  shapes = {name: (array.dtype, array.shape) for name, array in arrays.items()}
  _check_shapes(shapes, wanted | _images(arrays, P, S), "prompts")
  _check_range("prompts_PS", prompts, 0, limits.vocabulary - 1)
  _check_range("prompt_lengths_P", lengths, 1, S)


def _answer(groups: int, part: PartRequest, limits: CompletionLimits) -> Shapes:
  """The dtypes and shapes of the arrays in an answer with this number of groups."""
  PG, PGT = (groups, part.members), (groups, part.members, limits.tokens)
  wanted: Shapes = {
    "tokens_PGT": (np.dtype(np.int32), PGT),
    "lengths_PG": (np.dtype(np.int32), PG),
    "sampled_PGT": (np.dtype(bool), PGT),
    "logprobs_PGT": (np.dtype(np.float32), PGT),
    "behavior_logprobs_PGT": (np.dtype(np.float32), PGT),
    "stopped_by_PG": (np.dtype(np.int32), PG),
  }
  if part.keeps_experts:
    dtype, Y = np.dtype(limits.experts_dtype), limits.experts_in_all
    wanted["experts_PGTY"] = dtype, (*PGT, Y)
    wanted["prompt_experts_PSY"] = dtype, (groups, part.prompt_tokens, Y)
  return wanted


def _images(arrays: Mapping[str, np.ndarray], P: int, S: int) -> Shapes:
  """The dtypes and shapes that images of P prompts of length S must have. {} without images.

  Raises BadMessage if the names or axes are not those of images.
  """
  sent = {name.removeprefix(IMAGES): x for name, x in arrays.items() if name.startswith(IMAGES)}
  if not sent:
    return {}
  patches = sent.get("patches_PINC")
  if patches is None or patches.ndim != 4 or not sent.keys() <= Images.__dataclass_fields__.keys():
    raise BadMessage("it sent images that are none: other arrays, or patches without 4 axes")
  _, I, N, C = patches.shape
  int32, float32 = np.dtype(np.int32), np.dtype(np.float32)
  wanted: Shapes = {
    "patches_PINC": (float32, (P, I, N, C)),
    "places_PIN2": (int32, (P, I, N, 2)),
    "seen_PS2": (int32, (P, S, 2)),
  }
  if "positions_PS3" in sent:
    wanted |= {"positions_PS3": (int32, (P, S, 3)), "next_P": (int32, (P,))}
  return {f"{IMAGES}{name}": shape for name, shape in wanted.items()}


def _check_shapes(shapes: Shapes, wanted: Shapes, what: str) -> None:
  """Raises BadMessage if arrays have other names, dtypes or shapes than wanted."""
  other = sorted(shapes.keys() ^ wanted.keys())
  if other:
    verb = "sent" if other[0] in shapes else "left out"
    raise BadMessage(f"it {verb} {shown(other[0])}: other arrays than those of {what}")
  for name, (dtype, shape) in shapes.items():
    if (dtype, shape) != wanted[name]:
      raise BadMessage(
        f"it sent {name} as {dtype} of shape {shape}, not {' of '.join(map(str, wanted[name]))}"
      )


def _check_range(name: str, array: np.ndarray, least: int, most: int) -> None:
  wrong = array[(array < least) | (array > most)]
  if wrong.size:
    raise BadMessage(f"it sent {name} with {wrong[0]}, which is not between {least} and {most}")


def _check_field(fields: Mapping[str, Any], name: str, is_right: Callable[[Any], bool]) -> None:
  if not is_right(fields.get(name)):
    raise BadMessage(f"it sent {name} as {shown(fields.get(name, 'nothing'))}")


def _is_whole(value: Any) -> bool:
  return type(value) is int and 0 <= value < _MOST
