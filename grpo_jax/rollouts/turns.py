"""Turns: what the policy and an environment wrote in a completion, one after the other."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

POLICY = "assistant"  # the role of the policy


class Turn(NamedTuple):
  """A turn of a completion.

  Attributes:
    role: "assistant" for the policy, else the role of the environment's message.
    text: What was written, without special tokens.
    start: Its first token is this one of the completion.
    end: The token after its last one. The messages of an environment that come together share their
      tokens, with those that the chat template writes around them.
    reward: What the environment gave for it, or None.
    fields: What its message has beside its role, and in place of its text: of a turn with calls the
      `tool_calls` and the content without them, of a tool's reply its `name` and `tool_call_id`.
  """

  role: str
  text: str
  start: int
  end: int
  reward: float | None = None
  fields: dict[str, Any] | None = None

  @property
  def message(self) -> dict[str, Any]:
    """The message of OpenAI. The arguments of calls are dicts, as in TRL."""
    return {"role": self.role, "content": self.text, **(self.fields or {})}


class Conversation(NamedTuple):
  """What happened in a completion.

  Attributes:
    turns: Its turns.
    calls: How many tools the policy called.
    failures: How many of these calls failed: malformed ones, unknown tools, errors, time limits.
    problem: Why the environment gave no answer, or "".
    kind: Of the problem: "error", "timeout", "crash" or "".
    prompt_tokens: Of all calls of a harness together.
    computed_tokens: Those that were computed. The others were known from earlier calls.
    columns: What a harness returned beside the reward, for reward functions and completions/.
    metrics: Numbers of a harness, by name.
    environment: The name and the pickled object of an environment whose methods are tools, after
      the end.
    lost_tokens: What the policy wrote for a harness behind the most tokens of a completion.
  """

  turns: tuple[Turn, ...] = ()
  calls: int = 0
  failures: int = 0
  problem: str = ""
  kind: str = ""
  prompt_tokens: int = 0
  computed_tokens: int = 0
  columns: dict[str, Any] = {}
  metrics: dict[str, float] = {}
  environment: Sequence[str] = ()
  lost_tokens: int = 0

  @property
  def own(self) -> list[Turn]:
    """The turns of the policy."""
    return [turn for turn in self.turns if turn.role == POLICY]

  @property
  def last(self) -> str:
    """What the policy wrote last. "" if a harness never asked it."""
    return self.own[-1].text if self.own else ""

  @property
  def rewards(self) -> list[float | None]:
    """The rewards of the policy's turns. Empty where the environment failed."""
    return [] if self.problem else [turn.reward for turn in self.own]

  @property
  def tokens(self) -> int:
    """How many tokens the turns have."""
    return self.turns[-1].end if self.turns else 0

  def with_news(self, news: "Conversation") -> "Conversation":
    """The conversation with the turns that follow, and what happened in them."""
    calls, failures = self.calls + news.calls, self.failures + news.failures
    return news._replace(turns=self.turns + news.turns, calls=calls, failures=failures)

  def as_json(self) -> list[dict[str, Any]]:
    """The turns as files hold them: their texts have the calls."""
    return [
      {name: value for name, value in turn._asdict().items() if name != "fields"}
      for turn in self.turns
    ]


def turn_of(message: Mapping[str, Any], start: int, end: int) -> Turn:
  """The turn of a message that answers the policy."""
  fields = {name: value for name, value in message.items() if name in ("name", "tool_call_id")}
  return Turn(message["role"], message["content"], start, end, fields=fields or None)


def from_line(values: list[Any]) -> Conversation:
  """A conversation of what JSON made of it."""
  turns, *rest = values
  return Conversation(tuple(Turn(*turn) for turn in turns), *rest)
