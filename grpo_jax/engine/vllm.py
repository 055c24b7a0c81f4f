"""Sends requests to a server of vLLM, and reads its answers.

Tried with vLLM 0.32. Loading weights and the settings of a server are routes of its development
mode (VLLM_SERVER_DEV_MODE=1), which `command.py` turns on.
"""

from collections.abc import Mapping, Sequence
import math
from typing import Any, NamedTuple

from grpo_jax.engine.client import Client, ServerGone, ServerRefused
from grpo_jax.settings import shown

NAME = "policy"  # of the model, in requests
_SHORT = 30.0  # seconds for calls that compute nothing
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


class VllmServer:
  """A server of vLLM.

  Attributes:
    url: The address of the server.
  """

  def __init__(self, client: Client, seconds: float):
    """`seconds` is how long it may take for a completion, or to load weights."""
    self._client, self._seconds = client, seconds
    self._adapters: set[str] = set()  # names of the adapters that it was told to load
    self.url = client.url

  def is_there(self) -> None:
    """Checks its health. Raises ServerGone, or ServerRefused if it has no such route."""
    try:
      self._client.call("/health", seconds=_SHORT)
    except ServerRefused as error:
      if error.status < 500:
        raise
      raise ServerGone(str(error)) from None  # it starts, or has failed

  def drop(self, ask: Ask | None = None) -> None:
    """Ends all calls that wait for it, or the one of this request: they raise ServerGone."""
    self._client.drop(ask)

  def folder(self) -> str:
    """The folder that it was started with."""
    return str(self._model()["root"])

  def facts(self) -> Facts:
    """The settings that it reports. Raises ServerGone, or ServerRefused if it reports none."""
    longest, folder = self._model()["max_model_len"], self.folder()
    try:
      info = self._client.call("/server_info?config_format=json", seconds=_SHORT)
    except ServerRefused as error:
      raise ServerRefused(
        f"{error}; start it in development mode, as python -m grpo_jax.engine --print writes it"
      ) from None
    try:
      config = info["vllm_config"]["model_config"]
      overrides = config.get("hf_overrides") or {}
      return Facts(
        dtype=str(config["dtype"]).removeprefix("torch."),
        longest=int(longest),
        logprobs_mode=str(config["logprobs_mode"]),
        is_untied=dict(overrides).get("tie_word_embeddings") is False,
        folder=folder,
      )
    except (KeyError, TypeError, ValueError):
      raise ServerRefused(
        f"{self.url} does not say its settings at /server_info as vLLM 0.32 does"
      ) from None

  def text(self, token: int) -> str:
    """The text of a token by its tokenizer."""
    body = {"model": NAME, "tokens": [token]}
    return str(self._client.call("/detokenize", body, _SHORT)["prompt"])

  def draw(self, ask: Ask, name: str = NAME) -> DrawnTokens:
    """Draws tokens. `name` is the name of the model or of adapters.

    Raises:
      ServerGone: It does not answer, or was told to drop the row.
      ServerRefused: It does not draw, or the answer cannot be right.
    """
    # All settings are given that a folder's generation_config.json could change.
    body = dict(
      model=name,
      prompt=list(ask.prompt),
      max_tokens=ask.most,
      temperature=ask.temperature,
      top_p=1.0,
      top_k=0,
      min_p=0.0,
      repetition_penalty=1.0,
      presence_penalty=0.0,
      frequency_penalty=0.0,
      seed=ask.seed,
      stop_token_ids=list(ask.stop_ids),
      stop=list(ask.stop),
      ignore_eos=True,  # the stop ids have it
      skip_special_tokens=False,  # a stop text may be one
      logprobs=0,
      return_token_ids=True,
    )
    answer = self._client.call("/v1/completions", body, self._seconds, owner=ask)
    choice = _choice(answer, self.url)
    reason = choice.get("finish_reason")
    if reason == "abort":
      raise ServerGone(f"{self.url} dropped a row")
    tokens, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
    are_ids = isinstance(tokens, list) and all(
      type(token) is int and token >= 0 for token in tokens
    )
    if not are_ids or not 1 <= len(tokens) <= ask.most:
      raise ServerRefused(
        f"{self.url} drew {shown(tokens)}, and was asked for 1 to {ask.most} token ids"
      )
    if not _are_logprobs(logprobs, len(tokens)):
      raise ServerRefused(f"{self.url} drew {len(tokens)} tokens with log-probs {shown(logprobs)}")
    if reason != "stop" and len(tokens) < ask.most:
      raise ServerRefused(f"{self.url} ended a row after {len(tokens)} tokens, for {shown(reason)}")
    return DrawnTokens(tokens, logprobs, reason == "stop")

  def score(self, rows: Sequence[Sequence[int]], name: str = NAME) -> list[list[float]]:
    """The log-probs of each row's tokens from the second on. Raises ServerGone or ServerRefused."""
    body = dict(
      model=name,
      prompt=[list(row) for row in rows],
      max_tokens=1,
      temperature=1.0,
      prompt_logprobs=0,
    )
    answer, scores = self._client.call("/v1/completions", body, self._seconds), []
    for number, row in enumerate(rows):
      of_tokens = _choice(answer, self.url, number).get("prompt_logprobs")
      try:
        own = [of_tokens[place][str(row[place])]["logprob"] for place in range(1, len(row))]
      except (KeyError, IndexError, TypeError):
        own = None
      if not _are_logprobs(own, len(row) - 1):
        raise ServerRefused(f"{self.url} scored a row with {shown(of_tokens)}")
      scores.append(own)
    return scores

  def load(self, folder: str) -> None:
    """Lets it read the weights of a folder. Raises ServerGone or ServerRefused.

    `proof.py` then finds out whether it has them.
    """
    self._client.call("/pause?mode=keep", {}, self._seconds)
    try:
      # A server that was started without weights would go on to make them up.
      real = {"overrides": {"load_config": {"load_format": "auto"}}}
      self._all_workers("update_config", real)
      self._all_workers("reload_weights", {"weights_path": folder})
      self._client.call("/reset_prefix_cache", {}, self._seconds)
    finally:
      self._client.call("/resume", {}, self._seconds)

  def add_adapters(self, name: str, folder: str) -> None:
    """Lets it read adapters under a new name. Raises ServerGone or ServerRefused."""
    body, is_again = {"lora_name": name, "lora_path": folder}, name in self._adapters
    self._adapters.add(name)
    try:
      self._client.call("/v1/load_lora_adapter", body, self._seconds)
    except ServerRefused as error:
      # It may have loaded them although its answer was lost.
      if not is_again or "already been loaded" not in str(error):
        raise

  def remove_adapters(self, name: str, seconds: float = _SHORT) -> None:
    """Lets it forget adapters that are no longer used."""
    self._adapters.discard(name)
    try:
      self._client.call("/v1/unload_lora_adapter", {"lora_name": name}, seconds)
    except (ServerGone, ServerRefused):  # it has ended since, and with it the adapters
      pass

  def remove_all_adapters(self) -> None:
    """Lets it forget all adapters that it was told to load, if it does so soon."""
    for name in [*self._adapters]:
      self.remove_adapters(name, _SOON)

  def _all_workers(self, method: str, arguments: Mapping[str, Any]) -> None:
    body = {"method": method, "kwargs": arguments}
    self._client.call("/collective_rpc", body, self._seconds)

  def _model(self) -> Mapping[str, Any]:
    """The entry of its model in /v1/models."""
    answer = self._client.call("/v1/models", seconds=_SHORT)
    models = answer.get("data") if isinstance(answer, dict) else None
    for model in models or ():
      if isinstance(model, dict) and model.get("id") == NAME:
        if type(model.get("max_model_len")) is int and isinstance(model.get("root"), str):
          return model
    raise ServerRefused(
      f"{self.url} serves no model called {NAME!r}; start it as python -m grpo_jax.engine --print"
      " writes it"
    )


def _choice(answer: Any, url: str, number: int = 0) -> Mapping[str, Any]:
  choices = answer.get("choices") if isinstance(answer, dict) else None
  for choice in choices if isinstance(choices, list) else ():
    if isinstance(choice, dict) and choice.get("index") == number:
      return choice
  raise ServerRefused(f"{url} answers /v1/completions with {shown(answer)}")


def _are_logprobs(values: Any, count: int) -> bool:
  return (
    isinstance(values, list)
    and len(values) == count
    and all(type(x) in (int, float) and math.isfinite(x) and x < 1e-3 for x in values)
  )
