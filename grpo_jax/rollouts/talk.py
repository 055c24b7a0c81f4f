"""Lets tools and environments answer the policy's turns while other rows are sampled."""

from collections.abc import Callable, Collection, Iterator, Sequence
import json
import sys
import time
from typing import Any, NamedTuple
import uuid

import numpy as np

from grpo_jax.data.loader import PromptBatch
from grpo_jax.data.tokenizers.replies import Replies, call_id, tool_calls
from grpo_jax.environments import Environments, Outcome, Request, Runner, names
from grpo_jax.environments.acting import no_tool
from grpo_jax.environments.arguments import check_arguments
from grpo_jax.environments.returned import as_text
from grpo_jax.environments.tool_calls import Call
from grpo_jax.environments.workers import problem_of
from grpo_jax.parallel.hosts import Hosts
from grpo_jax.pending import Pending, wait_for_all, wait_for_one
from grpo_jax.rollouts.turns import POLICY, Conversation, Turn, from_line, turn_of
from grpo_jax.sampler.requests import StoppedRow
from grpo_jax.settings import ConfigError, RunFailed

Messages = list[dict[str, Any]]
Schemas = dict[str, dict[str, Any]]  # the schemas of tools, by name


class Talkers(NamedTuple):
  """The tools and environments that answer the policy, and the functions to call and read them.

  Attributes:
    environments: The tools and environments.
    runner: Calls the tools and environments.
    replies: Converts their messages to tokens.
    decode_text: Decodes tokens, and drops special tokens.
    decode_calls: Decodes tokens, and keeps the special tokens in tool calls.
    marks: The texts of these special tokens, which are removed from the content of a turn.
    hosts: The processes of the run.
    stops_on_error: Whether an environment that raises an exception ends the run.
  """

  environments: Environments
  runner: Runner
  replies: Replies
  decode_text: Callable[[list[int]], str]
  decode_calls: Callable[[list[int]], str]
  marks: Sequence[str]
  hosts: Hosts
  stops_on_error: bool


class _Called(NamedTuple):
  """A call of a tool.

  Attributes:
    name: The name of the tool.
    problem: The error in the call, or "".
    id: The id of the call in its conversation. "" for a malformed call, which is not in the field
      `tool_calls` of its message.
    arguments: The arguments by name.
  """

  name: str
  problem: str
  id: str
  arguments: dict[str, Any]


class _Asked(NamedTuple):
  """A turn of the policy, and the requests whose outcomes answer it.

  Attributes:
    row: The row that wrote the turn.
    text: The text of the turn.
    content: The text without the calls.
    calls: The tool calls in the text.
    requests: Unless `is_last`, a request for each call without an error, but only one for all calls
      of methods, which comes at the end. Or one request to an environment's `step`.
    is_last: Whether limits allow no further turn.
    methods: The names of the environment's methods that are tools. None if the environment has a
      `step`, or if there is no environment.
    failures: How many calls have failed already. It is 0 until the answers to the calls turn out
      not to fit, and the environment is asked for its reward alone.
  """

  row: StoppedRow
  text: str
  content: str
  calls: list[_Called]
  requests: list[Request]
  is_last: bool
  methods: Collection[str] | None = None
  failures: int = 0


class _Answer(NamedTuple):
  """The answer to a turn.

  Attributes:
    messages: The messages to the policy. Empty if the conversation has ended.
    reward: The reward of the turn, or None.
    failures: How many tool calls of the turn failed.
    problem, kind: The failure, as `problem_of` returns it.
    environment: The pickled object of an environment with methods, at its end. Otherwise "".
    has_ended: Whether an environment with methods has returned its final reward.
  """

  messages: Messages
  reward: float | None = None
  failures: int = 0
  problem: str = ""
  kind: str = ""
  environment: str = ""
  has_ended: bool = False


class _Question(NamedTuple):
  """A turn and the pending outcomes of its requests, sent at `since` by `time.monotonic`."""

  asked: _Asked
  outcomes: Pending[list[Outcome]]
  since: float


class Talk:
  """The conversations of the groups in flight. Each process sends the requests of its own prompts.

  Attributes:
    waits: Whether a row of any process waits for an answer.
  """

  def __init__(self, talkers: Talkers, group_size: int) -> None:
    """Begins without groups. `group_size` is G."""
    self._talkers, self._members = talkers, group_size
    self._settings = talkers.environments.settings
    self._name = uuid.uuid4().hex
    self._prompts: dict[int, tuple[PromptBatch, int]] = {}  # (batch, place in it) by group
    self._conversations: dict[tuple[int, int], Conversation] = {}
    # By row, the pickled environment after its last turn. "" if the object stays in its worker.
    self._states: dict[tuple[int, int], str] = {}
    self._waiting: set[tuple[int, int]] = set()  # (group, member) on all processes
    self._questions: dict[tuple[int, int], _Question] = {}  # by (group, member), of this process
    self._closing: list[Pending[list[Outcome]]] = []
    self._has_warned = False

  @property
  def waits(self) -> bool:
    return bool(self._waiting)

  def begin(self, number: int, prompts: PromptBatch, place: int) -> None:
    """Begins the conversations of group `number`, whose prompt has the index `place`."""
    self._prompts[number] = prompts, place

  def ask(self, rows: Sequence[StoppedRow]) -> None:
    """Sends the requests for the answers to the latest turns of `rows`."""
    if not rows:
      return
    self._waiting.update((row.prompt, row.member) for row in rows)
    own = [row for row in rows if self._is_own(row.prompt)]
    self._talkers.hosts.on_each(lambda: self._begin_questions(own))

  def answers(
    self, seconds: float, *, until_one: bool = False
  ) -> list[tuple[int, int, list[int] | None]]:
    """Waits for answers, and returns the same answers on every process.

    Args:
      seconds: How long to wait for an answer, counted from its question.
      until_one: Whether to keep waiting for the first answer if none has come by then.

    Returns:
      For each answer, (group, member, the tokens after which the row continues). The tokens are
      None if the row has ended.
    """
    # A question older than `seconds` is not waited for, so that it does not delay other rows.
    time_left = {at: one.since + seconds - time.monotonic() for at, one in self._questions.items()}
    young = [self._questions[at].outcomes for at in time_left if time_left[at] > 0]
    wait_for_all(young, max(time_left.values(), default=0.0))
    if until_one:
      wait_for_one([one.outcomes for one in self._questions.values()])
    hosts = self._talkers.hosts
    lines = hosts.on_each(lambda: [json.dumps(answer) for answer in self._take_answers()])
    found: list[tuple[int, int, list[int] | None]] = []
    for number, member, new_turns, ids in map(json.loads, hosts.join_lines(lines)):
      before = self._conversations.get((number, member), Conversation())
      self._conversations[number, member] = before.with_news(from_line(new_turns))
      self._waiting.remove((number, member))
      found.append((number, member, ids))
    return found

  def take(self, numbers: Sequence[int]) -> np.ndarray:
    """Removes and returns conversations of ended groups, object array [P, G] of `Conversation`."""
    found_PG = np.empty((len(numbers), self._members), object)
    for p, number in enumerate(numbers):
      for member in range(self._members):
        found_PG[p, member] = self._conversations.pop((number, member))
        self._states.pop((number, member), None)
      del self._prompts[number]
    if not self._prompts:  # no group is in flight, so no later call reports errors of closing
      self._talkers.hosts.on_each(lambda: self._end_all(self._closing))
    return found_PG

  def _is_own(self, number: int) -> bool:
    prompts, place = self._prompts[number]
    return prompts.own.start <= place < prompts.own.stop

  def _begin_questions(self, rows: Sequence[StoppedRow]) -> None:
    for row in rows:
      asked = self._requests_of_turn(row)
      outcomes = self._talkers.runner.start(asked.requests)
      self._questions[row.prompt, row.member] = _Question(asked, outcomes, time.monotonic())

  def _take_answers(self) -> list[tuple[int, int, Conversation, list[int] | None]]:
    """Returns (group, member, the new turns, the reply's tokens or None) for each ready answer."""
    found, ended = [], dict[str, str]()  # `ended` has pickled environments by key
    for at in [at for at, one in self._questions.items() if one.outcomes.is_ready]:
      question = self._questions.pop(at)  # `at` is (group, member)
      asked = question.asked
      answer = self._answer(asked, question.outcomes.result())
      news, ids = self._turns_and_reply(asked, answer)
      if ids is None and asked.methods is not None and not (answer.has_ended or answer.problem):
        # The methods' answers do not fit, so the row ends. Ask the environment for its reward. The
        # answer to this request has no messages, so the row ends when it comes.
        asked = asked._replace(
          requests=[self._request_of_methods(asked.row, [], True)],
          is_last=True,
          failures=answer.failures,
        )
        outcomes = self._talkers.runner.start(asked.requests)
        self._questions[at] = _Question(asked, outcomes, time.monotonic())
        continue
      found.append((*at, news, ids))
      if ids is None:
        ended[self._key(*at)] = self._states.pop(at, "")
    # A row may end at a limit, before its environment is done. Then the environment is still open.
    self._closing.append(self._talkers.runner.close(ended))
    self._end_all([one for one in self._closing if one.is_ready])
    return found

  def _end_all(self, closing: Sequence[Pending[list[Outcome]]]) -> None:
    """Waits for requests that close environments, and reports errors."""
    for pending in closing:
      for outcome in pending.result():
        self._problem_of(outcome)
    self._closing = [one for one in self._closing if not any(one is ended for ended in closing)]

  def _requests_of_turn(self, row: StoppedRow) -> _Asked:
    """Parses the latest turn of a row, and makes the requests for its answer."""
    conversation = self._conversation(row)
    tokens = row.tokens[conversation.tokens :]
    text = self._talkers.decode_text(tokens)
    index, earlier_turns = (row.prompt, row.member), len(conversation.own)
    # Another turn needs room for at least one token of the reply and one of the policy.
    is_last = row.room < 2 or earlier_turns + 1 >= self._settings.max_turns
    example = self._example(row.prompt)
    content, calls = self._calls(tokens, self._schemas(example), conversation.calls)
    task = str(example.get("task", ""))
    methods = self._talkers.environments.parts.methods_of_task(task)
    # An environment with methods also gets turns without calls: such a turn is the last, and the
    # environment returns its reward.
    if calls or methods is not None:
      valid: list[Request] = [
        {"tool": call.name, "arguments": call.arguments}
        for call in calls
        if not call.problem and not is_last
      ]
      requests = [one for one in valid if one["tool"] not in (methods or ())]
      if methods is not None:
        to_methods = [one for one in valid if one["tool"] in methods]
        requests.append(self._request_of_methods(row, to_methods, is_last or not calls))
      return _Asked(row, text, content if calls else text, calls, requests, is_last, methods)
    is_first = index not in self._states  # `_answer` stores a state after each turn
    if self._talkers.environments.parts.of_task(task) is None:  # nothing answers: the row ends
      return _Asked(row, text, text, [], [], is_last)
    request = {
      "task": task,
      "example": example if is_first else None,  # later, the environment has it
      "is_first": is_first,
      "state": self._states.pop(index, ""),
      "key": self._key(*index),  # names the conversation in its worker
      "message": {"role": POLICY, "content": text},
      "is_last": is_last,
    }
    return _Asked(row, text, text, [], [request], is_last)

  def _request_of_methods(self, row: StoppedRow, calls: list[Request], is_last: bool) -> Request:
    """Makes a request to call an environment's methods. The last one also gets the reward.

    Args:
      row: The row that has written the turn.
      calls: The calls of methods, as {"tool": ..., "arguments": ...}.
      is_last: Whether this is the policy's last turn.
    """
    index, example = (row.prompt, row.member), self._example(row.prompt)
    # `_answer_of_methods` stores a state after each turn: "" if the object stays in its worker.
    is_first = index not in self._states
    return {
      "task": str(example.get("task", "")),
      "example": example if is_first else None,  # later, the environment has it
      "is_first": is_first,
      "state": self._states.pop(index, ""),
      "key": self._key(*index),  # names the conversation in its worker
      "calls": calls,
      "is_last": is_last,
    }

  def _example(self, number: int) -> dict[str, Any]:
    """Returns the fields of the example of a group, without the prompt that was made from it."""
    prompts, place = self._prompts[number]
    row = prompts.row(place)
    return {name: value for name, value in row.items() if name not in ("prompts", "messages")}

  def _schemas(self, example: dict[str, Any]) -> Schemas:
    """Returns the schemas of the tools that an example may call, by name."""
    if not self._talkers.environments.all_schemas:  # a column `tools` is shown, and never called
      return {}
    tools = self._talkers.environments.tools_of(example)
    return {tool["function"]["name"]: tool for tool in tools}

  def _calls(self, tokens: list[int], schemas: Schemas, before: int) -> tuple[str, list[_Called]]:
    """Parses a turn. Returns (its content without calls, well-formed and then malformed calls).

    Args:
      tokens: The tokens of the turn.
      schemas: The schemas of the tools that the policy may call. If empty, returns ("", []).
      before: How many calls the completion had before this turn.
    """
    calls: list[_Called] = []
    if not schemas:
      return "", calls
    text = self._talkers.decode_calls(tokens)
    parsed = self._talkers.environments.format.parse(text, list(schemas.values()))
    for number, call in enumerate(parsed.calls, before):
      problem, arguments = _checked_arguments(call, schemas)
      if not problem and number >= self._settings.max_calls:
        problem = f"no more than {self._settings.max_calls} calls are allowed"
      calls.append(_Called(call.name, problem, call_id(number), arguments))
    content = parsed.content
    for mark in self._talkers.marks:
      content = content.replace(mark, "")
    return content, calls + [_Called("unknown", problem, "", {}) for problem in parsed.malformed]

  def _answer(self, asked: _Asked, outcomes: Sequence[Outcome]) -> _Answer:
    """Builds the answer to a turn from the outcomes of its requests."""
    if asked.methods is not None:
      return self._answer_of_methods(asked, asked.methods, outcomes)
    if asked.calls and asked.is_last:  # the calls were not executed
      return _Answer([])
    if asked.calls and (gone := _first_without_server(outcomes)):
      problem, kind = self._problem_of(gone)
      return _Answer([], problem=problem, kind=kind)
    if asked.calls:
      return _answer_of_tools(asked.calls, iter(outcomes))
    if not outcomes:  # a turn without calls, and the task has no environment
      return _Answer([])
    (outcome,) = outcomes
    problem, kind = self._problem_of(outcome)
    if problem:
      return _Answer([], problem=problem, kind=kind)
    self._states[asked.row.prompt, asked.row.member] = outcome["state"]
    return _Answer([] if outcome["done"] else outcome["messages"], outcome["reward"])

  def _answer_of_methods(
    self, asked: _Asked, methods: Collection[str], outcomes: Sequence[Outcome]
  ) -> _Answer:
    """Builds the answer to a turn, if the environment has methods as tools.

    Args:
      asked: The turn with its calls.
      methods: The names of the methods.
      outcomes: One for each valid call of another tool, then the environment's for all methods.
    """
    *of_tools, of_methods = outcomes
    self._states[asked.row.prompt, asked.row.member] = of_methods.get("state", "")
    # If the server of a tool is gone, the turn fails, even if the environment has answered. Then
    # the row ends, and the environment in this state is closed.
    problem, kind = self._problem_of(_first_without_server(of_tools) or of_methods)
    if problem:
      return _Answer([], failures=asked.failures, problem=problem, kind=kind)
    if of_methods["done"]:
      reward, pickled = of_methods["reward"], of_methods["environment"]
      return _Answer([], reward, asked.failures, environment=pickled, has_ended=True)
    # In the order of the calls again, which mix tools and methods.
    tools, contents = iter(of_tools), iter(of_methods["contents"])
    ordered = [
      next(contents if call.name in methods else tools) for call in asked.calls if not call.problem
    ]
    return _answer_of_tools(asked.calls, iter(ordered))

  def _turns_and_reply(
    self, asked: _Asked, answer: _Answer
  ) -> tuple[Conversation, list[int] | None]:
    """Returns (the turn and its reply, the reply's token ids).

    The ids are None if the row ends, or if no reply fits. `_take_answers` may then drop the result
    and ask the environment for its reward first.
    """
    row, end = asked.row, len(asked.row.tokens)
    start, fields = self._conversation(row).tokens, _as_fields(asked)
    turns = [Turn(POLICY, asked.text, start, end, answer.reward, fields)]
    ids: list[int] | None = None
    if answer.messages and not asked.is_last:
      ids = self._ids(answer.messages, row)
      if len(ids) >= row.room:  # no room for another token of the policy
        ids = None
    if ids is not None:
      after = end + len(ids)
      turns += [turn_of(message, end, after) for message in answer.messages]
    calls, failures = len(asked.calls), answer.failures
    news = Conversation(tuple(turns), calls, failures, answer.problem, answer.kind)
    if answer.environment:  # pickled: its class is named by the task's entry, or that of all tasks
      by_task = names.by_task(self._settings.name)
      task = str(self._example(row.prompt).get("task", ""))
      news = news._replace(environment=(by_task.get(task, by_task.get("")), answer.environment))
    return news, ids

  def _ids(self, messages: Messages, row: StoppedRow) -> list[int]:
    """Returns the token ids of messages that follow a row, framed by the chat template."""
    try:
      tools = self._talkers.environments.tools_of(self._example(row.prompt))
      texts = [{**message, "content": as_text(message["content"])} for message in messages]
      return self._talkers.replies.ids(texts, row.stopped_by, tools)
    except ConfigError as error:  # RunFailed instead, so that the run saves a checkpoint
      raise RunFailed(str(error)) from error

  def _conversation(self, row: StoppedRow) -> Conversation:
    return self._conversations.get((row.prompt, row.member), Conversation())

  def _key(self, number: int, member: int) -> str:
    return f"{self._name}:{number}:{member}"

  def _problem_of(self, outcome: Outcome) -> tuple[str, str]:
    """Returns the failure of an environment, as `problem_of` does, and warns or ends the run."""
    problem, kind = problem_of(outcome, "the environment")
    if kind == "error" and self._talkers.stops_on_error:
      raise RunFailed(f"{problem}; with reward.on_error=none the run would go on")
    if problem:
      self._warn(problem)
    return problem, kind

  def _warn(self, problem: str) -> None:
    """Warns of the first failure, and of no later one."""
    if not self._has_warned:
      print(f"warning: {problem}: the completion ends there", file=sys.stderr, flush=True)
      self._has_warned = True


def _as_fields(asked: _Asked) -> dict[str, Any] | None:
  """Returns the fields `content` and `tool_calls` of a turn. None for a turn without calls."""
  calls = [call for call in asked.calls if call.id]
  if not calls:
    return None
  entries = [(call.id, call.name, call.arguments) for call in calls]
  return {"content": asked.content, "tool_calls": tool_calls(entries)}


def _checked_arguments(call: Call, schemas: Schemas) -> tuple[str, dict[str, Any]]:
  """Parses and checks the arguments of a call. Returns (error or "", arguments)."""
  try:
    arguments = json.loads(call.arguments)
  except (ValueError, RecursionError):
    return "the arguments are not JSON", {}
  if call.name not in schemas:
    return no_tool(call.name, schemas), arguments
  return check_arguments(schemas[call.name], arguments), arguments


def _first_without_server(outcomes: Sequence[Outcome]) -> Outcome | None:
  """Returns the outcome of the first tool whose server is gone, or None."""
  return next((outcome for outcome in outcomes if "error" in outcome), None)


def _answer_of_tools(calls: Sequence[_Called], outcomes: Iterator[Outcome]) -> _Answer:
  """Builds the answer to a turn with tool calls: one message for each call.

  Args:
    calls: The calls of the turn.
    outcomes: The outcomes of the valid calls, in order, with `content` and `failed`, or `failure`.
  """
  messages, failures = [], 0
  for call in calls:
    # A call with an error was not executed, so it has no outcome yet.
    outcome: Outcome = {"failed": True} if call.problem else next(outcomes)
    problem = call.problem or problem_of(outcome, call.name)[0]
    if problem:
      outcome = {"content": f"error: {problem}", "failed": True}
    failures += outcome["failed"]
    message = {"role": "tool", "name": call.name, "content": outcome["content"]}
    messages.append(message | ({"tool_call_id": call.id} if call.id else {}))
  return _Answer(messages, failures=failures)
