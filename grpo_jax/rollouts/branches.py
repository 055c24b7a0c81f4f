"""Turns the calls that a program makes to the policy into rows to learn from.

The calls of a rollout form trees. A call is the child of an earlier one if its prompt begins with
that call's prompt and answer. Every other call begins a tree, as the first call of each agent does.
A branch is a path from the first call of a tree to a call without children. The policy reads the
tokens that the program added between two calls, and does not learn them. Tokens that two branches
share are learned once, in the first of the two.

The rows of a group have one prompt: the tokens with which the first calls of all its branches
begin. If agents have different system prompts, the rest of each lies in its rows. There it is read
and not learned.
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
    tokens: The token ids, from the prompt of its first call on.
    calls: For each token, the number of the call that wrote it. -1 if the program wrote it.
    sampled: For each token, whether it is learned: the policy wrote it, and no earlier branch has
      it.
    logprobs: For each token, its log-prob, or 0 if the program wrote it.
    is_cut: Whether a limit ended the branch.
    asked: How many tokens the prompt of its first call has.
  """

  tokens: tuple[int, ...] = ()
  calls: tuple[int, ...] = ()
  sampled: tuple[bool, ...] = ()
  logprobs: tuple[float, ...] = ()
  is_cut: bool = False
  asked: int = 0

  @property
  def prompt(self) -> tuple[int, ...]:
    """The prompt of its first call."""
    return self.tokens[: self.asked]

  def after(self, start: int, most: int) -> "Branch":
    """The `most` tokens from `start` on."""
    kept = slice(start, start + most)
    return Branch(
      self.tokens[kept],
      self.calls[kept],
      self.sampled[kept],
      self.logprobs[kept],
      self.is_cut or len(self.tokens) > start + most,
      max(0, self.asked - start),
    )


def branches_of(traces: Sequence[Trace], count: int) -> tuple[list[Branch], int]:
  """The branches of a rollout.

  Args:
    traces: The calls in the order in which they were asked.
    count: The most branches.

  Returns:
    (branches, the number of calls that are in none of them). There is at least one branch, which
    has no tokens if there was no call. The first branch begins with the prompt of the first call,
    and has the most tokens of the policy among those that do. Each later branch has the most tokens
    that no earlier branch has.
  """
  paths = _paths(traces)
  found, learned = list[Branch](), set[int]()

  def new_tokens(path: Branch) -> int:
    return sum(call >= 0 and call not in learned for call in path.calls)

  first = tuple(traces[0].prompt) if traces else ()
  choices = [path for path in paths if path.tokens[: len(first)] == first]
  while paths and len(found) < count:
    best = max(choices, key=new_tokens)
    if not new_tokens(best):
      break
    choices = paths
    sampled = tuple(call >= 0 and call not in learned for call in best.calls)
    found.append(best._replace(sampled=sampled))
    learned |= {call for call in best.calls if call >= 0}
  return found or [Branch()], len(traces) - len(learned)


def shared_prompt(branches: Sequence[Branch], most: int) -> tuple[int, ...]:
  """The first tokens that the prompts of all branches share, at most so many."""
  prompts = [branch.prompt for branch in branches]
  length = min(map(len, prompts), default=0)
  same = (len(set(tokens)) == 1 for tokens in zip(*prompts))
  return prompts[0][: min(most, sum(itertools.takewhile(bool, same)))] if length else ()


def _paths(traces: Sequence[Trace]) -> list[Branch]:
  """The path from the first call of a tree to each call, with the tokens of both included.

  A call's parent is the earlier one whose path is the longest beginning of the call's prompt.
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
  """Rows as arrays.

  Args:
    rows: The rows by their places [p, b]. Rows at other places are empty.
    shape: The sizes (P, B).
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
