"""Converts the calls that a program makes to the policy into rows to learn from.

The calls of a rollout form trees. A call is the child of an earlier one if its prompt begins with
that call's prompt and answer. Every other call is the root of a tree, such as the first call of
each agent. A branch is a path from a root to a call without children. Tokens that the program added
between two calls are in the row, but not in the loss. Tokens that two branches share are in the
loss once, in the first of the two.

All rows of a group have the same prompt: the longest common prefix of the prompts of its roots. If
agents have different system prompts, the rest of each prompt is at the start of its rows, and not
in the loss.
"""

from collections.abc import Mapping, Sequence
import itertools
from typing import NamedTuple

import numpy as np

from grpo_jax.serving.traces import Trace
from grpo_jax.types import Completions


class Branch(NamedTuple):
  """The tokens of a branch.

  Attributes:
    tokens: The token ids, from the prompt of the first call on.
    calls: For each token, the index of the call that wrote it. -1 if the program wrote it.
    sampled: For each token, whether it is in the loss: the policy wrote it, and no earlier branch
      has it.
    logprobs: For each token, its log-prob, or 0 if the program wrote it.
    is_cut: Whether a token limit cut the branch off.
    asked: How many tokens the prompt of the first call has.
    next_call: The index of the first call whose answer was cut off as a whole by `after`, or -1.
  """

  tokens: tuple[int, ...] = ()
  calls: tuple[int, ...] = ()
  sampled: tuple[bool, ...] = ()
  logprobs: tuple[float, ...] = ()
  is_cut: bool = False
  asked: int = 0
  next_call: int = -1

  @property
  def prompt(self) -> tuple[int, ...]:
    """The prompt of the branch's first call."""
    return self.tokens[: self.asked]

  def after(self, start: int, most: int) -> "Branch":
    """Returns the branch with only the tokens from `start` on, at most `most` of them."""
    window = slice(start, start + most)
    kept = {*self.calls[: start + most]}
    dropped = (call for call in self.calls[start + most :] if call not in {-1, *kept})
    return Branch(
      self.tokens[window],
      self.calls[window],
      self.sampled[window],
      self.logprobs[window],
      self.is_cut or len(self.tokens) > start + most,
      max(0, self.asked - start),
      next(dropped, -1),
    )


def branches_of(traces: Sequence[Trace], count: int) -> tuple[list[Branch], int]:
  """Selects up to `count` branches of a rollout, greedily by how many new tokens each adds.

  The first branch becomes the completion of the rollout, so it must begin with the prompt of the
  first call. A new token is one that the policy wrote and no earlier branch has.

  Args:
    traces: The calls in the order in which the program made them.
    count: The largest number of branches.

  Returns:
    (branches, the number of calls in none of them). Without calls, one branch without tokens.
  """
  paths = _paths(traces)
  found, learned = list[Branch](), set[int]()

  def new_tokens(path: Branch) -> int:
    return sum(call >= 0 and call not in learned for call in path.calls)

  first = tuple(traces[0].prompt) if traces else ()
  choices = [path for path in paths if path.tokens[: len(first)] == first]  # for the first branch
  while paths and len(found) < count:
    best = max(choices, key=new_tokens)
    if not new_tokens(best):
      break
    choices = paths  # only the first branch must begin with `first`
    sampled = tuple(call >= 0 and call not in learned for call in best.calls)
    found.append(best._replace(sampled=sampled))
    learned |= {call for call in best.calls if call >= 0}
  return found or [Branch()], len(traces) - len(learned)


def shared_prompt(branches: Sequence[Branch], most: int) -> tuple[int, ...]:
  """Returns the longest common prefix of the branches' prompts, cut to `most` tokens."""
  prompts = [branch.prompt for branch in branches]
  length = min(map(len, prompts), default=0)
  same = (len(set(tokens)) == 1 for tokens in zip(*prompts))
  return prompts[0][: min(most, sum(itertools.takewhile(bool, same)))] if length else ()


def _paths(traces: Sequence[Trace]) -> list[Branch]:
  """Returns for each call the path from its root, including the call's own answer.

  A call's parent is the earlier call whose path is the longest prefix of the call's prompt.
  """
  paths = list[Branch]()
  for number, trace in enumerate(traces):
    prompt = tuple(trace.prompt)
    ancestors = [path for path in paths if prompt[: len(path.tokens)] == path.tokens]
    parent = max(ancestors, key=lambda path: len(path.tokens), default=Branch())
    added = prompt[len(parent.tokens) :]  # by the program, after the parent's answer
    paths.append(
      Branch(
        tokens=parent.tokens + added + tuple(trace.tokens),
        calls=parent.calls + (-1,) * len(added) + (number,) * len(trace.tokens),
        logprobs=parent.logprobs + (0.0,) * len(added) + tuple(trace.logprobs),
        is_cut=trace.finish == "length",
        asked=parent.asked or len(prompt),
      )
    )
  return paths


def as_completions(
  rows: Mapping[tuple[int, int], Branch], shape: tuple[int, int], T: int
) -> Completions:
  """Converts rows to padded numpy arrays.

  Args:
    rows: The rows by their indices [p, b]. Rows at other indices are empty.
    shape: The sizes (P, B).
    T: The token limit of a row.
  """
  found = Completions(
    tokens_PGT=np.zeros((*shape, T), np.int32),
    lengths_PG=np.zeros(shape, np.int32),
    sampled_PGT=np.zeros((*shape, T), bool),
    logprobs_PGT=np.zeros((*shape, T), np.float32),
    behavior_logprobs_PGT=np.zeros((*shape, T), np.float32),
    stopped_by_PG=np.full(shape, -1, np.int32),  # -1: a limit cut the row off
  )
  for index, row in rows.items():
    length = len(row.tokens)
    found.tokens_PGT[index][:length] = row.tokens
    found.sampled_PGT[index][:length] = row.sampled
    found.logprobs_PGT[index][:length] = np.where(row.sampled, row.logprobs, 0)
    found.lengths_PG[index] = length
    if length and not row.is_cut:
      found.stopped_by_PG[index] = row.tokens[-1]  # a row includes the token that ended it
  # A run with a harness has no filters (`traced.Harness`), so both log-probs are the same.
  return found.replace(behavior_logprobs_PGT=found.logprobs_PGT.copy())
