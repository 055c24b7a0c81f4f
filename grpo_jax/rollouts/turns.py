"""Turns: the texts that the policy and an environment wrote in a completion, in order."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from grpo_jax.environments.returned import as_text

POLICY = "assistant"  # the role of the policy


class Turn(NamedTuple):
  """A turn of a completion.

  Attributes:
    role: "assistant" for the policy, else the role of the environment's message.
    text: The text, without special tokens.
    start: The index of the turn's first token in the completion.
    end: The index after the last token. Messages of an environment that come together have the same
      `start` and `end`, around all of them and the chat template's tokens.
    reward: The reward of the turn, or None.
    fields: Further fields of the message. A turn with calls has `tool_calls`, and `content` without
      the calls. A tool's reply has `name` and `tool_call_id`, and `content` if it is a list.
  """

  role: str
  text: str
  start: int
  end: int
  reward: float | None = None
  fields: dict[str, Any] | None = None

  @property
  def message(self) -> dict[str, Any]:
    """The turn as a message in OpenAI's format, but arguments of calls are dicts, as in TRL."""
    return {"role": self.role, "content": self.text, **(self.fields or {})}


class Conversation(NamedTuple):
  """The turns of a completion, and the calls, failures and metrics in it.

  Attributes:
    turns: The turns in order.
    calls: How many tool calls the policy made.
    failures: How many of these calls failed: malformed, unknown tool, error or timeout.
    problem: Why the environment or harness failed, in a line, or "".
    kind: The kind of failure: "error", "timeout", "crash" or "".
    prompt_tokens: How many tokens the prompts of all calls of a harness have together.
    computed_tokens: How many of these were computed. The others were in the prefix cache.
    columns: The columns that a harness returned, for reward functions and completions/.
    metrics: The metrics that a harness returned, by name.
    environment: After the last turn, (name, pickled object in base64) of an environment whose
      methods are tools. Otherwise empty.
    lost_tokens: How many tokens that the policy wrote for a harness did not fit into the rows.
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
    """The text of the policy's last turn. "" if a harness never called the policy."""
    return self.own[-1].text if self.own else ""

  @property
  def rewards(self) -> list[float | None]:
    """The rewards of the policy's turns. Empty if the environment failed."""
    return [] if self.problem else [turn.reward for turn in self.own]

  @property
  def tokens(self) -> int:
    """How many tokens the turns have."""
    return self.turns[-1].end if self.turns else 0

  def with_news(self, news: "Conversation") -> "Conversation":
    """Appends the turns of `news` and adds its call counts. Replaces all other fields."""
    calls, failures = self.calls + news.calls, self.failures + news.failures
    return news._replace(turns=self.turns + news.turns, calls=calls, failures=failures)

  def as_json(self) -> list[dict[str, Any]]:
    """Returns the turns as the files in completions/ record them: the texts include the calls."""
    return [
      {name: value for name, value in turn._asdict().items() if name != "fields"}
      for turn in self.turns
    ]


def turn_of(message: Mapping[str, Any], start: int, end: int) -> Turn:
  """Converts a message that answers the policy to a turn. Its content is a text or a list."""
  fields = {name: value for name, value in message.items() if name in ("name", "tool_call_id")}
  if isinstance(message["content"], list):
    fields["content"] = message["content"]
  return Turn(message["role"], as_text(message["content"]), start, end, fields=fields or None)


def from_line(values: list[Any]) -> Conversation:
  """Restores a conversation that was sent as JSON, which turns tuples into lists."""
  turns, *rest = values
  return Conversation(tuple(Turn(*turn) for turn in turns), *rest)
