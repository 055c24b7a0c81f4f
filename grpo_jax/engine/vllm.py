"""vLLM: requests to a server and its answers, and the command line that starts one.

Tried with vLLM 0.32. Loading weights and the settings of a server are routes of its development
mode (VLLM_SERVER_DEV_MODE=1), which `environment` turns on.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from grpo_jax.config import Config
from grpo_jax.engine.client import ServerRefused
from grpo_jax.engine.server import (
  NAME,
  SHORT,
  Ask,
  DrawnTokens,
  EngineKind,
  EngineServer,
  Facts,
  are_logprobs,
  checked,
  longest_row,
)
from grpo_jax.settings import shown

_TOKENS_AT_ONCE = 4096  # prompt tokens per batch on CPUs
_UNTIED = '{"tie_word_embeddings": false}'


class VllmServer(EngineServer):
  """A server of vLLM."""

  load_adapter, unload_adapter = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
  is_loaded = "already been loaded"

  def folder(self) -> str:
    return str(self._model()["root"])

  def facts(self) -> Facts:
    longest, folder = self._model()["max_model_len"], self.folder()
    try:
      info = self._client.call("/server_info?config_format=json", seconds=SHORT)
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
    body = {"model": NAME, "tokens": [token]}
    return str(self._client.call("/detokenize", body, SHORT)["prompt"])

  def draw(self, ask: Ask, name: str = NAME) -> DrawnTokens:
    # Every setting is sent that the model folder's generation_config.json could change.
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
      ignore_eos=True,  # the end-of-sequence token is among the stop ids
      skip_special_tokens=False,  # a stop text may be a special token
      logprobs=0,
      return_token_ids=True,
    )
    answer = self._client.call("/v1/completions", body, self._seconds, owner=ask)
    choice = _choice(answer, self.url)
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
    reason = choice.get("finish_reason")
    return checked(self.url, ask, choice.get("token_ids"), logprobs, reason)

  def score(self, rows: Sequence[Sequence[int]], name: str = NAME) -> list[list[float]]:
    body = dict(
      model=name,
      prompt=[list(row) for row in rows],
      max_tokens=1,  # vLLM always draws at least one
      temperature=1.0,
      prompt_logprobs=0,
    )
    answer, scores = self._client.call("/v1/completions", body, self._seconds), []
    for number, row in enumerate(rows):
      of_tokens = _choice(answer, self.url, number).get("prompt_logprobs")
      try:  # entry i maps token ids, among them that of token i, to log-probs
        logprobs = [of_tokens[i][str(row[i])]["logprob"] for i in range(1, len(row))]
      except (KeyError, IndexError, TypeError):
        logprobs = None
      if not are_logprobs(logprobs, len(row) - 1):
        raise ServerRefused(f"{self.url} scored a row with {shown(of_tokens)}")
      scores.append(logprobs)
    return scores

  def load(self, folder: str) -> None:
    self._client.call("/pause?mode=keep", {}, self._seconds)
    try:
      # A server that was started with dummy weights would otherwise make up dummy ones again.
      from_files = {"overrides": {"load_config": {"load_format": "auto"}}}
      self._all_workers("update_config", from_files)
      self._all_workers("reload_weights", {"weights_path": folder})
      self._client.call("/reset_prefix_cache", {}, self._seconds)
    finally:
      self._client.call("/resume", {}, self._seconds)

  def _all_workers(self, method: str, arguments: Mapping[str, Any]) -> None:
    """Calls a method in all worker processes of the server."""
    body = {"method": method, "kwargs": arguments}
    self._client.call("/collective_rpc", body, self._seconds)

  def _model(self) -> Mapping[str, Any]:
    """Returns the policy's entry in /v1/models. Raises ServerRefused if there is none."""
    answer = self._client.call("/v1/models", seconds=SHORT)
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
  """Returns the choice with index `number` in an answer. Raises ServerRefused if it is missing."""
  choices = answer.get("choices") if isinstance(answer, dict) else None
  for choice in choices if isinstance(choices, list) else ():
    if isinstance(choice, dict) and choice.get("index") == number:
      return choice
  raise ServerRefused(f"{url} answers /v1/completions with {shown(answer)}")


def environment(config: Config, on_cpu: bool) -> dict[str, str]:
  """Returns the environment variables of a server. The arguments are those of `EngineKind`."""
  found = {"VLLM_SERVER_DEV_MODE": "1"}  # enables the routes that load weights
  if config.lora.rank:
    found["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
  if on_cpu:
    found |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "2"}
  return found


def command(
  config: Config, url: str, folder: str = "", *, on_cpu: bool = False, program: str = ""
) -> list[str]:
  """Returns the command line of a server. The arguments are those of `server.WritesCommand`."""
  split, sampling = urlsplit(url), config.sampling
  found = [program or "vllm", "serve", folder or config.model.path, "--served-model-name", NAME]
  found += ["--host", split.hostname or "127.0.0.1", "--port", str(split.port)]
  found += ["--dtype", sampling.dtype or config.model.dtype]
  # One more, because vLLM always draws at least one token, even after a prompt to score.
  length = longest_row(config) + 1
  found += ["--max-model-len", str(length), "--seed", str(config.seed)]
  # `vllm` means that the folder's generation_config.json sets no defaults.
  found += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
  if config.data.tokenizer:
    found += ["--tokenizer", config.data.tokenizer]
  if config.rollout.engine_tensor > 1:
    found += ["--tensor-parallel-size", str(config.rollout.engine_tensor)]
  if config.lora.rank:
    found += ["--enable-lora", "--max-lora-rank", str(_rank(config.lora.rank))]
  elif not folder:  # the run brings all weights, and with LoRA only adapters
    found += ["--load-format", "dummy"]
  if on_cpu:
    # vLLM 0.32 crashes on CPUs when it splits the prompt of a row that has a seed.
    found += ["--enforce-eager", "--no-enable-chunked-prefill"]
    found += ["--max-num-batched-tokens", str(max(length, _TOKENS_AT_ONCE))]
    if not config.lora.rank:
      # vLLM 0.32 repacks the output head for CPUs. If the head is tied to the embedding, it does so
      # only once and would miss later weights.
      found += ["--hf-overrides", _UNTIED]
  return found


def _rank(rank: int) -> int:
  """Returns the smallest rank that vLLM supports and that is at least `rank`."""
  return next((size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= rank), rank)


ENGINE = EngineKind(VllmServer, command, environment, "VLLM_API_KEY", "--max-model-len", 1)
