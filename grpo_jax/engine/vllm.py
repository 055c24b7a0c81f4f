"""What a server of vLLM is asked, and what its answers mean.

Tried with vLLM 0.32. Loading weights and the settings of a server are routes of its development
mode (VLLM_SERVER_DEV_MODE=1), which `command.py` turns on.
"""

from collections.abc import Mapping, Sequence
import math
from typing import Any, NamedTuple

from grpo_jax.engine.client import Client, Gone, Refused
from grpo_jax.settings import shown

NAME = "policy"  # of the model, in requests
_SHORT = 30.0  # seconds for calls that compute nothing
_SOON = 2.0  # and where a run that ends waits for them


class Ask(NamedTuple):
  """Tokens that are wanted after others.

  Attributes:
    prompt: All token ids before them.
    most: How many, at most.
    temperature: At 0, the likeliest are taken.
    seed: Of their random numbers.
    stop_ids: Tokens that end them.
    stop: Texts that end them.
  """

  prompt: Sequence[int]
  most: int
  temperature: float
  seed: int
  stop_ids: Sequence[int]
  stop: Sequence[str]


class Drawn(NamedTuple):
  """Tokens that were drawn.

  Attributes:
    tokens: Their ids.
    logprobs: Under softmax(logits / temperature). At temperature 0, of temperature 1.
    has_stopped: Whether a stop id or a stop text ended them, and not their number.
  """

  tokens: list[int]
  logprobs: list[float]
  has_stopped: bool


class Facts(NamedTuple):
  """What a server says of itself.

  Attributes:
    dtype: It computes in, such as float32.
    longest: The most tokens of a row, with its prompt.
    logprobs_mode: Which log-probs it returns.
    is_untied: Whether it reads an output head from folders whose model uses the embedding instead.
    folder: What it was started with.
  """

  dtype: str
  longest: int
  logprobs_mode: str
  is_untied: bool
  folder: str


class VllmServer:
  """A server of vLLM.

  Attributes:
    url: Where it is.
  """

  def __init__(self, client: Client, seconds: float):
    """`seconds` is what it may take for a completion, or to load weights."""
    self._client, self._seconds = client, seconds
    self._adapters: set[str] = set()  # that it was told to load
    self.url = client.url

  def is_there(self) -> None:
    """Raises Gone unless it answers that it is well, or Refused if it has no such answer."""
    try:
      self._client.call("/health", seconds=_SHORT)
    except Refused as error:
      if error.status < 500:
        raise
      raise Gone(str(error)) from None  # it starts, or has failed

  def drop(self, ask: Ask | None = None) -> None:
    """Ends the calls that wait for it, or the one that draws this: they raise Gone."""
    self._client.drop(ask)

  def folder(self) -> str:
    """The folder that it was started with."""
    return str(self._model()["root"])

  def facts(self) -> Facts:
    """What it says of itself. Raises Gone, or Refused if it does not say it."""
    longest, folder = self._model()["max_model_len"], self.folder()
    try:
      info = self._client.call("/server_info?config_format=json", seconds=_SHORT)
    except Refused as error:
      raise Refused(
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
      raise Refused(
        f"{self.url} does not say its settings at /server_info as vLLM 0.32 does"
      ) from None

  def text(self, token: int) -> str:
    """The text of a token by its tokenizer."""
    body = {"model": NAME, "tokens": [token]}
    return str(self._client.call("/detokenize", body, _SHORT)["prompt"])

  def draw(self, ask: Ask, name: str = NAME) -> Drawn:
    """Draws tokens. `name` is that of the model, or of adapters.

    Raises:
      Gone: It does not answer, or was told to drop the row.
      Refused: It does not draw, or the answer cannot be right.
    """
    # All that generation_config.json of a folder could change is set.
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
    answer = self._client.call("/v1/completions", body, self._seconds, of=ask)
    choice = _choice(answer, self.url)
    reason = choice.get("finish_reason")
    if reason == "abort":
      raise Gone(f"{self.url} dropped a row")
    tokens, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
    are_ids = isinstance(tokens, list) and all(
      type(token) is int and token >= 0 for token in tokens
    )
    if not are_ids or not 1 <= len(tokens) <= ask.most:
      raise Refused(f"{self.url} drew {shown(tokens)}, and was asked for 1 to {ask.most} token ids")
    if not _are_logprobs(logprobs, len(tokens)):
      raise Refused(f"{self.url} drew {len(tokens)} tokens with log-probs {shown(logprobs)}")
    if reason != "stop" and len(tokens) < ask.most:
      raise Refused(f"{self.url} ended a row after {len(tokens)} tokens, for {shown(reason)}")
    return Drawn(tokens, logprobs, reason == "stop")

  def score(self, rows: Sequence[Sequence[int]], name: str = NAME) -> list[list[float]]:
    """The log-probs of the tokens of each row, from the second one on. Raises Gone or Refused."""
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
        raise Refused(f"{self.url} scored a row with {shown(of_tokens)}")
      scores.append(own)
    return scores

  def load(self, folder: str) -> None:
    """Lets it read the weights of a folder. Raises Gone or Refused.

    Whether it has them afterwards, `proof.py` finds out.
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
    """Lets it read adapters under a new name. Raises Gone or Refused."""
    body, is_again = {"lora_name": name, "lora_path": folder}, name in self._adapters
    self._adapters.add(name)
    try:
      self._client.call("/v1/load_lora_adapter", body, self._seconds)
    except Refused as error:
      # It may have loaded them although its answer was lost.
      if not is_again or "already been loaded" not in str(error):
        raise

  def remove_adapters(self, name: str, seconds: float = _SHORT) -> None:
    """Lets it forget adapters that nothing draws with any more."""
    self._adapters.discard(name)
    try:
      self._client.call("/v1/unload_lora_adapter", {"lora_name": name}, seconds)
    except (Gone, Refused):  # it has ended since, and with it the adapters
      pass

  def remove_all_adapters(self) -> None:
    """Lets it forget all adapters that it was told to load, if it does so soon."""
    for name in [*self._adapters]:
      self.remove_adapters(name, _SOON)

  def _all_workers(self, method: str, arguments: Mapping[str, Any]) -> None:
    body = {"method": method, "kwargs": arguments}
    self._client.call("/collective_rpc", body, self._seconds)

  def _model(self) -> Mapping[str, Any]:
    """What it says of its model."""
    answer = self._client.call("/v1/models", seconds=_SHORT)
    models = answer.get("data") if isinstance(answer, dict) else None
    for model in models or ():
      if isinstance(model, dict) and model.get("id") == NAME:
        if type(model.get("max_model_len")) is int and isinstance(model.get("root"), str):
          return model
    raise Refused(
      f"{self.url} serves no model called {NAME!r}; start it as python -m grpo_jax.engine --print"
      " writes it"
    )


def _choice(answer: Any, url: str, number: int = 0) -> Mapping[str, Any]:
  choices = answer.get("choices") if isinstance(answer, dict) else None
  for choice in choices if isinstance(choices, list) else ():
    if isinstance(choice, dict) and choice.get("index") == number:
      return choice
  raise Refused(f"{url} answers /v1/completions with {shown(answer)}")


def _are_logprobs(values: Any, count: int) -> bool:
  return (
    isinstance(values, list)
    and len(values) == count
    and all(type(x) in (int, float) and math.isfinite(x) and x < 1e-3 for x in values)
  )
