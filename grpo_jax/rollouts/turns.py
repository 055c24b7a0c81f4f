"""Turns: the texts that the policy and an environment wrote in a completion, in their order."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

POLICY = "assistant"  # the role of the policy


class Turn(NamedTuple):
  """A turn of a completion.

  Attributes:
    role: "assistant" for the policy, else the role of the environment's message.
    text: Its text, without special tokens.
    start: The index of its first token in the completion.
    end: The index after its last token. Messages of an environment that come together share their
      tokens, and the tokens that the chat template writes around them.
    reward: The reward that the environment gave for it, or None.
    fields: Further fields of its message. A turn with calls has `tool_calls`, and its content
      without them. A tool's reply has its `name` and `tool_call_id`.
  """

  role: str
  text: str
  start: int
  end: int
  reward: float | None = None
  fields: dict[str, Any] | None = None

  @property
  def message(self) -> dict[str, Any]:
    """The turn as a message in OpenAI's format. The arguments of calls are dicts, as in TRL."""
    return {"role": self.role, "content": self.text, **(self.fields or {})}


class Conversation(NamedTuple):
  """The turns of a completion, and the calls, failures and metrics in it.

  Attributes:
    turns: Its turns.
    calls: How many tools the policy called.
    failures: How many of these calls failed: malformed ones, unknown tools, errors, time limits.
    problem: Why the environment gave no answer, or "".
    kind: The kind of the problem: "error", "timeout", "crash" or "".
    prompt_tokens: How many tokens the prompts of all calls of a harness have together.
    computed_tokens: How many of these were computed. The others were cached from earlier calls.
    columns: The columns that a harness returned, for reward functions and completions/.
    metrics: The metrics that a harness returned, by name.
    environment: At the end, the name and the pickled object of an environment whose methods are
      tools.
    lost_tokens: How many tokens the policy wrote for a harness beyond sampling.max_tokens.
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
    """The text of the policy's last turn. "" if a harness never asked it."""
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
    """The conversation followed by the turns, counts and results of `news`."""
    calls, failures = self.calls + news.calls, self.failures + news.failures
    return news._replace(turns=self.turns + news.turns, calls=calls, failures=failures)

  def as_json(self) -> list[dict[str, Any]]:
    """The turns as completions/ has them: their texts include the calls."""
    return [
      {name: value for name, value in turn._asdict().items() if name != "fields"}
      for turn in self.turns
    ]


def turn_of(message: Mapping[str, Any], start: int, end: int) -> Turn:
  """The turn of a message that answers the policy."""
  fields = {name: value for name, value in message.items() if name in ("name", "tool_call_id")}
  return Turn(message["role"], message["content"], start, end, fields=fields or None)


def from_line(values: list[Any]) -> Conversation:
  """A conversation from the list that JSON makes of it."""
  turns, *rest = values
  return Conversation(tuple(Turn(*turn) for turn in turns), *rest)
