"""The parts that all engines share: requests, answers and their checks, and adapters.

A module for an engine has a subclass of `EngineServer` and an `EngineKind` that `engines.py` lists.
"""

import abc
from collections.abc import Callable, Sequence
import math
import os
from typing import Any, NamedTuple, Protocol

from grpo_jax.config import Config
from grpo_jax.engine.client import Client, ServerGone, ServerRefused
from grpo_jax.settings import ConfigError, shown

NAME = "policy"  # the model's name at the server, without adapters
SHORT = 30.0  # timeout in seconds of calls that compute nothing
_SOON = 2.0  # timeout in seconds of such calls at the end of a run


class Ask(NamedTuple):
  """A request for the tokens of one turn.

  Attributes:
    prompt: All token ids before the turn.
    most: The token limit of the turn.
    temperature: The sampling temperature. 0 samples greedily.
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
  """The tokens of one turn.

  Attributes:
    tokens: The token ids.
    logprobs: The log-prob of each token under softmax(logits / temperature), or under
      softmax(logits) at temperature 0.
    has_stopped: Whether a stop id or a stop text ended the turn, rather than its limit.
  """

  tokens: list[int]
  logprobs: list[float]
  has_stopped: bool


class Facts(NamedTuple):
  """The settings that a server reports.

  Attributes:
    dtype: The dtype in which the server computes, such as float32.
    longest: The token limit of a row, prompt included.
    logprobs_mode: Which log-probs the server returns. The run needs "processed_logprobs", those
      under softmax(logits / temperature), because the learner computes the same.
    is_untied: Whether the server expects an output head in the weights although the model ties its
      head to the embedding.
    folder: The folder that the server was started with.
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

  # The routes that load and unload adapters, and a part of the error for a name already in use.
  load_adapter, unload_adapter, is_loaded = "", "", ""

  def __init__(self, client: Client, seconds: float):
    """`seconds` is the timeout of calls that draw, score or load weights."""
    self._client, self._seconds = client, seconds
    self._adapters: set[str] = set()  # the names of the adapters that the run has loaded there
    self.url = client.url

  def is_there(self) -> None:
    """Checks the server's health. Raises ServerGone, or ServerRefused if it has no such route."""
    try:
      self._client.call("/health", seconds=SHORT)
    except ServerRefused as error:
      if error.status < 500:
        raise
      raise ServerGone(str(error)) from None  # the server is starting or has failed

  def drop(self, ask: Ask | None = None) -> None:
    """Aborts the pending call of this request, or all if it is None. They raise ServerGone."""
    self._client.drop(ask)

  @abc.abstractmethod
  def folder(self) -> str:
    """Asks the server which folder it was started with."""

  @abc.abstractmethod
  def facts(self) -> Facts:
    """Asks for the server's settings. Raises ServerGone, or ServerRefused if some are missing."""

  @abc.abstractmethod
  def text(self, token: int) -> str:
    """Lets the server's tokenizer decode one token id. Returns the text."""

  @abc.abstractmethod
  def draw(self, ask: Ask, name: str = NAME) -> DrawnTokens:
    """Draws the tokens of a turn. `name` is the name of the model or of adapters.

    Raises:
      ServerGone: The server does not answer, or `drop` ended the call.
      ServerRefused: The server answers with an error, or with something that cannot be right.
    """

  @abc.abstractmethod
  def score(self, rows: Sequence[Sequence[int]], name: str = NAME) -> list[list[float]]:
    """Returns the log-probs of each row's tokens from the second on. Raises as `draw` does."""

  @abc.abstractmethod
  def load(self, folder: str) -> None:
    """Lets the server load the weights in a folder. Raises ServerGone or ServerRefused.

    `proof.py` then finds out whether the server has really loaded them.
    """

  def add_adapters(self, name: str, folder: str) -> None:
    """Lets the server load adapters under a new name. Raises ServerGone or ServerRefused."""
    body, is_again = {"lora_name": name, "lora_path": folder}, name in self._adapters
    self._adapters.add(name)
    try:
      self._client.call(self.load_adapter, body, self._seconds)
    except ServerRefused as error:
      # In a retry, this error is fine: the first call loaded them, and only its answer was lost.
      if not is_again or self.is_loaded not in str(error):
        raise

  def remove_adapters(self, name: str, seconds: float = SHORT) -> None:
    """Lets the server unload adapters that are no longer used. Ignores errors."""
    self._adapters.discard(name)
    try:
      self._client.call(self.unload_adapter, {"lora_name": name}, seconds)
    except (ServerGone, ServerRefused):  # a server that has exited has no adapters either
      pass

  def remove_all_adapters(self) -> None:
    """Lets the server unload all adapters of this run, with a short timeout for each."""
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
      url: The address of the server.
      folder: The model folder to serve. "" means model.path, with dummy weights until the run
        brings the first.
      on_cpu: Whether the server computes on CPUs.
      program: The name or path of the engine's program. "" finds it in the search path.
    """


class EngineKind(NamedTuple):
  """An engine: how to start its servers and how to talk to them.

  Attributes:
    server: The class that talks to one server.
    command: Writes the command line that starts a server.
    environment: Returns the environment variables that a server needs, from the config and whether
      the server computes on CPUs.
    key: The name of the environment variable with the API key.
    length_option: The command-line option for the token limit of a row.
    spare: How much larger than the longest row this limit must be, including the tokens that the
      engine keeps free and leaves out of the limit that it reports.
  """

  server: type[EngineServer]
  command: WritesCommand
  environment: Callable[[Config, bool], dict[str, str]]
  key: str
  length_option: str
  spare: int

  def read_key(self) -> str:
    """Reads the API key from the environment, without the blanks and line ends around it.

    Returns:
      The key, or "" if there is none.

    Raises:
      ConfigError: HTTP cannot send the key.
    """
    key = os.environ.get(self.key, "").strip()
    if not (key.isascii() and key.isprintable()):  # the message must not show the key
      raise ConfigError(
        f"environment variable {self.key}: a key has printable ASCII characters only; set it again"
      )
    return key


def longest_row(config: Config) -> int:
  """Returns the most tokens that a prompt and its completion can have together."""
  return config.data.max_prompt_tokens + config.sampling.max_tokens


def checked(url: str, ask: Ask, tokens: Any, logprobs: Any, reason: Any) -> DrawnTokens:
  """Checks a server's answer, whose values may have any type, and returns the turn.

  Args:
    url: The address of the server.
    ask: The request.
    tokens: The token ids in the answer.
    logprobs: The log-probs in the answer.
    reason: Why the turn ended: "stop", "length" or "abort".

  Raises:
    ServerGone: The server aborted the request. The caller then draws the row again.
    ServerRefused: Tokens, log-probs or the reason cannot be right for this request.
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
  """Returns whether `values` is a list of `count` finite log-probs, none above rounding errors."""
  return (
    isinstance(values, list)
    and len(values) == count
    and all(type(x) in (int, float) and math.isfinite(x) and x < 1e-3 for x in values)
  )
