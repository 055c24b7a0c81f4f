"""What a program asked the policy, as rows that are learned.

The calls of a rollout are a tree: a call whose prompt goes on from an earlier one, with all that
the policy wrote there, is its child. A branch is a path from the first call to one that no other
goes on from. What a program added between two calls is read and not learned. What two branches have
in common is learned once, in the first of them.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from grpo_jax.serving.traces import Trace
from grpo_jax.types import Completions


class Branch(NamedTuple):
  """The tokens of a branch after its prompt.

  Attributes:
    tokens: Their ids.
    calls: The number of the call that wrote each, or -1 where the program did.
    sampled: Whether it is learned: the policy wrote it, and no earlier branch has it.
    logprobs: 0 where the program wrote it.
    is_cut: Whether a limit ended it.
  """

  tokens: tuple[int, ...] = ()
  calls: tuple[int, ...] = ()
  sampled: tuple[bool, ...] = ()
  logprobs: tuple[float, ...] = ()
  is_cut: bool = False

  @property
  def is_own(self) -> np.ndarray:
    """bool, whether the policy wrote each token."""
    return np.array(self.calls, int) >= 0

  def up_to(self, most: int) -> "Branch":
    """The first `most` tokens."""
    return Branch(
      self.tokens[:most],
      self.calls[:most],
      self.sampled[:most],
      self.logprobs[:most],
      self.is_cut or len(self.tokens) > most,
    )


def branches_of(
  traces: Sequence[Trace], prompt: Sequence[int], most: int, count: int
) -> tuple[list[Branch], int]:
  """The branches of a rollout.

  Args:
    traces: The calls in their order.
    prompt: What the prompts of all calls begin with. Calls of which that is not so are left out.
    most: T, to which branches are cut.
    count: The most branches.

  Returns:
    At least one branch, which has no tokens if there was no call. The first has the most tokens of
    the policy, and each other the most that those before it have not. And the number of calls that
    are in none of them.
  """
  paths = _paths(traces, list(prompt))
  found, learned = list[Branch](), set[int]()

  def new_tokens(path: Branch) -> int:
    return sum(call >= 0 and call not in learned for call in path.calls)

  while paths and len(found) < count:
    best = max(paths, key=new_tokens)
    if not new_tokens(best):
      break
    sampled = tuple(call >= 0 and call not in learned for call in best.calls)
    found.append(best._replace(sampled=sampled).up_to(most))
    learned |= {call for call in best.calls if call >= 0}
  return found or [Branch()], len(traces) - len(learned)


def _paths(traces: Sequence[Trace], prompt: list[int]) -> list[Branch]:
  """The path to each call, from the prompt."""
  paths = list[Branch]()
  for number, trace in enumerate(traces):
    if trace.prompt[: len(prompt)] != prompt:
      continue
    read = tuple(trace.prompt[len(prompt) :])
    before = [path for path in paths if read[: len(path.tokens)] == path.tokens]
    parent = max(before, key=lambda path: len(path.tokens), default=Branch())
    given, wrote = read[len(parent.tokens) :], len(trace.tokens)
    paths.append(
      Branch(
        parent.tokens + given + tuple(trace.tokens),
        parent.calls + (-1,) * len(given) + (number,) * wrote,
        (),
        parent.logprobs + (0.0,) * len(given) + tuple(trace.logprobs),
        trace.finish == "length",
      )
    )
  return paths


def as_completions(
  rows: Mapping[tuple[int, int], Branch], shape: tuple[int, int], T: int
) -> Completions:
  """Rows as arrays.

  Args:
    rows: By their places. The rest is empty.
    shape: Of the places.
    T: The most tokens of a row.
  """
  found = Completions(
    tokens_PGT=np.zeros((*shape, T), np.int32),
    lengths_PG=np.zeros(shape, np.int32),
    sampled_PGT=np.zeros((*shape, T), bool),
    logprobs_PGT=np.zeros((*shape, T), np.float32),
    behavior_logprobs_PGT=np.zeros((*shape, T), np.float32),
    stopped_by_PG=np.full(shape, -1, np.int32),
  )
  for place, row in rows.items():
    length = len(row.tokens)
    found.tokens_PGT[place][:length] = row.tokens
    found.sampled_PGT[place][:length] = row.sampled
    found.logprobs_PGT[place][:length] = np.where(row.sampled, row.logprobs, 0)
    found.lengths_PG[place] = length
    if length and not row.is_cut:
      found.stopped_by_PG[place] = row.tokens[-1]
  return found.replace(behavior_logprobs_PGT=found.logprobs_PGT.copy())
