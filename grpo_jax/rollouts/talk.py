"""Tools and environments answer what the policy writes, while it is sampled."""

from collections.abc import Callable, Iterator, Sequence
import json
import sys
from typing import Any, NamedTuple
import uuid

import numpy as np

from grpo_jax.data.loader import PromptBatch
from grpo_jax.data.tokenizers.replies import Replies
from grpo_jax.environments import Environments, Outcome, Request, Runner
from grpo_jax.environments.arguments import check_arguments
from grpo_jax.environments.tool_calls import Call
from grpo_jax.environments.workers import problem_of
from grpo_jax.parallel.hosts import Hosts
from grpo_jax.rollouts.turns import POLICY, Conversation, Turn, from_line
from grpo_jax.sampler.requests import Ended
from grpo_jax.settings import ConfigError, RunFailed

Messages = list[dict[str, Any]]
Schemas = dict[str, dict[str, Any]]  # of tools, by name


class Talkers(NamedTuple):
  """What answers the policy.

  Attributes:
    environments: The tools and environments.
    runner: Calls them.
    replies: Makes tokens of what they say.
    decode_text: Makes a text of tokens.
    decode_calls: Makes a text of tokens with the special tokens that calls of tools have.
    hosts: The processes of the run.
    stops_on_error: Whether an environment that raises something ends the run.
  """

  environments: Environments
  runner: Runner
  replies: Replies
  decode_text: Callable[[list[int]], str]
  decode_calls: Callable[[list[int]], str]
  hosts: Hosts
  stops_on_error: bool


class _Asked(NamedTuple):
  """A turn, and what answers it.

  Attributes:
    row: The row that wrote it.
    text: What it wrote.
    calls: Its calls of tools, and what is wrong with each, or "".
    requests: To tools, in the order of the calls that can be made, or to the environment.
    is_last: Whether no other turn can follow.
  """

  row: Ended
  text: str
  calls: list[tuple[str, str]]
  requests: list[Request]
  is_last: bool


class _Answer(NamedTuple):
  """What answers a turn. Without messages, the conversation has ended."""

  messages: Messages
  reward: float | None = None
  failures: int = 0
  problem: str = ""
  kind: str = ""


class Talk:
  """The conversations of the P * G rows of one call of the sampler."""

  def __init__(self, talkers: Talkers, prompts: PromptBatch, group_size: int) -> None:
    """Begins with prompts."""
    self._talkers, self._prompts, self._members = talkers, prompts, group_size
    self._settings = talkers.environments.settings
    self._name = uuid.uuid4().hex
    self._conversations: dict[tuple[int, int], Conversation] = {}
    # Of the environments that have taken a step. "" for one that stays in its worker.
    self._states: dict[tuple[int, int], str] = {}
    self._has_warned = False

  def reply(self, ended: list[Ended]) -> list[list[int] | None]:
    """The tokens with which rows go on, or None. See `sampling.Reply`.

    Each process asks for the rows of its own prompts.
    """
    hosts, own = self._talkers.hosts, self._prompts.own
    rows = [row for row in ended if own.start <= row.prompt < own.stop]
    lines = hosts.on_each(lambda: [json.dumps(one) for one in self._ask(rows)])
    ids_of: dict[tuple[int, int], list[int] | None] = {}
    for p, g, news, ids in map(json.loads, hosts.join_lines(lines)):
      before = self._conversations.get((p, g), Conversation())
      self._conversations[p, g], ids_of[p, g] = before.with_news(from_line(news)), ids
    return [ids_of[row.prompt, row.member] for row in ended]

  def conversations(self, prompts: Sequence[int]) -> np.ndarray:
    """The conversations of some prompts, object array [P, G] of `Conversation`."""
    found_PG = np.empty((len(prompts), self._members), object)
    for place, p in enumerate(prompts):
      for g in range(self._members):
        found_PG[place, g] = self._conversations[p, g]
    return found_PG

  def _ask(self, rows: Sequence[Ended]) -> list[tuple[int, int, Conversation, list[int] | None]]:
    """For each row: its prompt, its number, what is new, and the tokens that follow."""
    asked = [self._asked(row) for row in rows]
    outcomes = iter(self._talkers.runner([request for one in asked for request in one.requests]))
    found = []
    for one in asked:
      answer = self._answer(one, [next(outcomes) for _ in one.requests])
      found.append((one.row.prompt, one.row.member, *self._news(one, answer)))
    ended = [self._key(p, g) for p, g, _, ids in found if ids is None]
    for outcome in self._talkers.runner.close(ended):
      self._problem_of(outcome)
    return found

  def _asked(self, row: Ended) -> _Asked:
    """What a row has written, and what is to be done for it."""
    conversation = self._conversation(row)
    tokens = row.tokens[conversation.tokens :]
    text = self._talkers.decode_text(tokens)
    index, number = (row.prompt, row.member), len(conversation.own)
    # One token of a reply and one of another turn.
    is_last = row.room < 2 or number + 1 >= self._settings.max_turns
    example = self._example(row.prompt)
    calls, requests = self._calls(tokens, self._schemas(example), conversation.calls)
    if calls:
      return _Asked(row, text, calls, [] if is_last else requests, is_last)
    task, is_first = str(example.get("task", "")), index not in self._states
    if self._talkers.environments.parts.of_task(task) is None:
      return _Asked(row, text, [], [], is_last)
    request = {
      "task": task,
      "example": example if is_first else None,
      "is_first": is_first,
      "state": self._states.pop(index, ""),
      "key": self._key(*index),
      "message": {"role": POLICY, "content": text},
      "is_last": is_last,
    }
    return _Asked(row, text, [], [request], is_last)

  def _example(self, p: int) -> dict[str, Any]:
    """The fields of the example that prompt p was made from."""
    row = self._prompts.row(p)
    return {name: value for name, value in row.items() if name not in ("prompts", "messages")}

  def _schemas(self, example: dict[str, Any]) -> Schemas:
    """The tools that an example has, by name."""
    tools = self._talkers.environments.tools_of(example)
    return {one["function"]["name"]: one for one in tools}

  def _calls(
    self, tokens: list[int], schemas: Schemas, before: int
  ) -> tuple[list[tuple[str, str]], list[Request]]:
    """The calls in a turn, what is wrong with each, and requests for those that are right.

    Args:
      tokens: What the policy wrote.
      schemas: Of the tools that it may call.
      before: How many calls the completion had before.
    """
    calls: list[tuple[str, str]] = []
    requests: list[Request] = []
    if not schemas:
      return calls, requests
    text = self._talkers.decode_calls(tokens)
    parsed = self._talkers.environments.format.parse(text, list(schemas.values()))
    for call in parsed.calls:
      problem, arguments = _checked(call, schemas)
      if not problem and before + len(calls) >= self._settings.max_calls:
        problem = f"no more than {self._settings.max_calls} calls are allowed"
      calls.append((call.name, problem))
      if not problem:
        requests.append({"tool": call.name, "arguments": arguments})
    return calls + [("unknown", problem) for problem in parsed.malformed], requests

  def _answer(self, one: _Asked, outcomes: Sequence[Outcome]) -> _Answer:
    if one.calls and one.is_last:
      return _Answer([])
    if one.calls:
      return _of_tools(one.calls, iter(outcomes))
    if not outcomes:
      return _Answer([])
    (outcome,) = outcomes
    problem, kind = self._problem_of(outcome)
    if problem:
      return _Answer([], problem=problem, kind=kind)
    self._states[one.row.prompt, one.row.member] = outcome["state"]
    return _Answer([] if outcome["done"] else outcome["messages"], outcome["reward"])

  def _news(self, one: _Asked, answer: _Answer) -> tuple[Conversation, list[int] | None]:
    """A turn and what answers it, and the tokens that follow."""
    row, end = one.row, len(one.row.tokens)
    turns = [Turn(POLICY, one.text, self._conversation(row).tokens, end, answer.reward)]
    ids: list[int] | None = None
    if answer.messages and not one.is_last:
      ids = self._ids(answer.messages, row)
      if len(ids) >= row.room:  # nobody would read it
        ids = None
    if ids is not None:
      after = end + len(ids)
      turns += [Turn(one["role"], one["content"], end, after) for one in answer.messages]
    calls, failures = len(one.calls), answer.failures
    return Conversation(tuple(turns), calls, failures, answer.problem, answer.kind), ids

  def _ids(self, messages: Messages, row: Ended) -> list[int]:
    try:
      tools = self._talkers.environments.tools_of(self._example(row.prompt))
      return self._talkers.replies.ids(messages, row.stopped_by, tools)
    except ConfigError as error:  # the run has begun, and saves what it has
      raise RunFailed(str(error)) from error

  def _conversation(self, row: Ended) -> Conversation:
    return self._conversations.get((row.prompt, row.member), Conversation())

  def _key(self, p: int, g: int) -> str:
    return f"{self._name}:{p}:{g}"

  def _problem_of(self, outcome: Outcome) -> tuple[str, str]:
    """What went wrong in an environment, as `problem_of` has it. An error may end the run."""
    problem, kind = problem_of(outcome, "the environment")
    if kind == "error" and self._talkers.stops_on_error:
      raise RunFailed(f"{problem}; with reward.on_error=none the run would go on")
    if problem:
      self._warn(problem)
    return problem, kind

  def _warn(self, problem: str) -> None:
    """Says once for all rows what went wrong."""
    if not self._has_warned:
      print(f"warning: {problem}: the completion ends there", file=sys.stderr, flush=True)
      self._has_warned = True


def _checked(call: Call, schemas: Schemas) -> tuple[str, dict[str, Any]]:
  """What is wrong with a call, or "", and its arguments."""
  if call.name not in schemas:
    return f"there is no tool {call.name!r:.80}; there are {', '.join(schemas)}", {}
  try:
    arguments = json.loads(call.arguments)
  except (ValueError, RecursionError):
    return "the arguments are not JSON", {}
  return check_arguments(schemas[call.name], arguments), arguments


def _of_tools(calls: Sequence[tuple[str, str]], outcomes: Iterator[Outcome]) -> _Answer:
  """The messages of tools.

  Args:
    calls: What was called, and what is wrong with each call, or "".
    outcomes: Iterates over what the calls that are right gave.
  """
  messages, failures = [], 0
  for name, problem in calls:
    outcome: Outcome = {"failed": True} if problem else next(outcomes)
    problem = problem or problem_of(outcome, name)[0]
    if problem:
      outcome = {"content": f"error: {problem}", "failed": True}
    failures += outcome["failed"]
    messages.append({"role": "tool", "name": name, "content": outcome["content"]})
  return _Answer(messages, failures=failures)
