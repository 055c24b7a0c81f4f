"""The parts that all engines share: requests, answers and their checks, and adapters.

An engine is a file with a subclass of `EngineServer` and an `EngineKind`, which `engines.py` lists.
"""

import abc
from collections.abc import Callable, Sequence
import math
from typing import Any, NamedTuple, Protocol

from grpo_jax.config import Config
from grpo_jax.engine.client import Client, ServerGone, ServerRefused
from grpo_jax.settings import shown

NAME = "policy"  # of the model without adapters
SHORT = 30.0  # seconds for calls that compute nothing
_SOON = 2.0  # seconds for such calls at the end of a run


class Ask(NamedTuple):
  """A request for tokens that follow a prompt.

  Attributes:
    prompt: All token ids before them.
    most: The most tokens to draw.
    temperature: The sampling temperature. 0 takes the likeliest tokens.
    seed: The seed of the random numbers.
    stop_ids: Tokens that end the row.
    stop: Texts that end the row.
  """

  prompt: Sequence[int]
  most: int
  temperature: float
  seed: int
  stop_ids: Sequence[int]
  stop: Sequence[str]


class DrawnTokens(NamedTuple):
  """Tokens that were drawn.

  Attributes:
    tokens: The token ids.
    logprobs: Their log-probs under softmax(logits / temperature). At temperature 0, those under
      temperature 1.
    has_stopped: Whether a stop id or a stop text ended the row, and not its limit.
  """

  tokens: list[int]
  logprobs: list[float]
  has_stopped: bool


class Facts(NamedTuple):
  """The settings that a server reports.

  Attributes:
    dtype: The dtype in which it computes, such as float32.
    longest: The most tokens of a row, with its prompt.
    logprobs_mode: Which log-probs it returns.
    is_untied: Whether it reads an output head of its own for a model that uses the embedding.
    folder: The folder that it was started with.
  """

  dtype: str
  longest: int
  logprobs_mode: str
  is_untied: bool
  folder: str


class EngineServer(abc.ABC):
  """A server of an engine.

  Attributes:
    url: The address of the server.
  """

  # The routes that load and unload adapters, and the words that refuse a name that is taken.
  load_adapter, unload_adapter, is_loaded = "", "", ""

  def __init__(self, client: Client, seconds: float):
    """`seconds` is how long it may take for a completion, or to load weights."""
    self._client, self._seconds = client, seconds
    self._adapters: set[str] = set()  # names of the adapters that it was told to load
    self.url = client.url

  def is_there(self) -> None:
    """Checks its health. Raises ServerGone, or ServerRefused if it has no such route."""
    try:
      self._client.call("/health", seconds=SHORT)
    except ServerRefused as error:
      if error.status < 500:
        raise
      raise ServerGone(str(error)) from None  # it starts, or has failed

  def drop(self, ask: Ask | None = None) -> None:
    """Ends all calls that wait for it, or the one of this request: they raise ServerGone."""
    self._client.drop(ask)

  @abc.abstractmethod
  def folder(self) -> str:
    """The folder that it was started with."""

  @abc.abstractmethod
  def facts(self) -> Facts:
    """The settings that it reports. Raises ServerGone, or ServerRefused if it reports none."""

  @abc.abstractmethod
  def text(self, token: int) -> str:
    """The text of a token by its tokenizer."""

  @abc.abstractmethod
  def draw(self, ask: Ask, name: str = NAME) -> DrawnTokens:
    """Draws tokens. `name` is the name of the model or of adapters.

    Raises:
      ServerGone: It does not answer, or was told to drop the row.
      ServerRefused: It does not draw, or the answer cannot be right.
    """

  @abc.abstractmethod
  def score(self, rows: Sequence[Sequence[int]], name: str = NAME) -> list[list[float]]:
    """The log-probs of each row's tokens from the second on. Raises ServerGone or ServerRefused."""

  @abc.abstractmethod
  def load(self, folder: str) -> None:
    """Lets it read the weights of a folder. Raises ServerGone or ServerRefused.

    `proof.py` then finds out whether it has them.
    """

  def add_adapters(self, name: str, folder: str) -> None:
    """Lets it read adapters under a new name. Raises ServerGone or ServerRefused."""
    body, is_again = {"lora_name": name, "lora_path": folder}, name in self._adapters
    self._adapters.add(name)
    try:
      self._client.call(self.load_adapter, body, self._seconds)
    except ServerRefused as error:
      # It may have loaded them although its answer was lost.
      if not is_again or self.is_loaded not in str(error):
        raise

  def remove_adapters(self, name: str, seconds: float = SHORT) -> None:
    """Lets it forget adapters that are no longer used."""
    self._adapters.discard(name)
    try:
      self._client.call(self.unload_adapter, {"lora_name": name}, seconds)
    except (ServerGone, ServerRefused):  # it has ended since, and with it the adapters
      pass

  def remove_all_adapters(self) -> None:
    """Lets it forget all adapters that it was told to load, if it does so soon."""
    for name in [*self._adapters]:
      self.remove_adapters(name, _SOON)


class WritesCommand(Protocol):
  """Writes the command line that starts a server."""

  def __call__(
    self, config: Config, url: str, folder: str = "", *, on_cpu: bool = False, program: str = ""
  ) -> list[str]:
    """Returns the words of the command.

    Args:
      config: The config of the run.
      url: The address at which it serves.
      folder: The model folder that it serves. "" is model.path, whose weights it does not read:
        the run brings them.
      on_cpu: Whether it computes on CPUs.
      program: The name or path of the engine's program. "" is the one in the search path.
    """


class EngineKind(NamedTuple):
  """An engine.

  Attributes:
    server: Talks to a server of it.
    command: Writes the command line of a server.
    environment: Returns the environment variables that a server needs, for a config and whether it
      computes on CPUs.
    key: The environment variable with the key that is sent to servers.
    length_option: The option of a server that says how many tokens a row may have.
    spare: How many tokens more than the longest row it must say.
  """

  server: type[EngineServer]
  command: WritesCommand
  environment: Callable[[Config, bool], dict[str, str]]
  key: str
  length_option: str
  spare: int


def longest_row(config: Config) -> int:
  """The most tokens of a prompt and its completion."""
  return config.data.max_prompt_tokens + config.sampling.max_tokens


def checked(url: str, ask: Ask, tokens: Any, logprobs: Any, reason: Any) -> DrawnTokens:
  """The tokens that a server drew, if they can be right.

  Args:
    url: The address of the server.
    ask: The request.
    tokens: The token ids in its answer.
    logprobs: Their log-probs.
    reason: Why the row ended: stop, length or abort.

  Raises:
    ServerGone: It has dropped the row.
    ServerRefused: They cannot be right.
  """
  if reason == "abort":
    raise ServerGone(f"{url} dropped a row")
  are_ids = isinstance(tokens, list) and all(type(token) is int and token >= 0 for token in tokens)
  if not are_ids or not 1 <= len(tokens) <= ask.most:
    raise ServerRefused(f"{url} drew {shown(tokens)}, and was asked for 1 to {ask.most} token ids")
  if not are_logprobs(logprobs, len(tokens)):
    raise ServerRefused(f"{url} drew {len(tokens)} tokens with log-probs {shown(logprobs)}")
  if reason != "stop" and len(tokens) < ask.most:
    raise ServerRefused(f"{url} ended a row after {len(tokens)} tokens, for {shown(reason)}")
  return DrawnTokens(tokens, logprobs, reason == "stop")


def are_logprobs(values: Any, count: int) -> bool:
  """Whether these are `count` log-probs."""
  return (
    isinstance(values, list)
    and len(values) == count
    and all(type(x) in (int, float) and math.isfinite(x) and x < 1e-3 for x in values)
  )
