"""SGLang: requests to a server and its answers, and the command line that starts one."""

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

_SPARE = 7  # SGLang limits a prompt to --context-length minus this many tokens
_HOT = 1e4  # a temperature at which all tokens are about equally likely
_MOST_DIFFERENCE = 0.02  # between the log-probs of two tokens at this temperature
# Always sent, because the server's option --preferred-sampling-params could change the defaults.
_NO_FILTERS = dict(top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0)
_NO_FILTERS |= dict(presence_penalty=0.0, frequency_penalty=0.0)


class SglangServer(EngineServer):
  """A server of SGLang. Follows the source of version 0.5.23, and was never run with SGLang."""

  load_adapter, unload_adapter = "/load_lora_adapter", "/unload_lora_adapter"
  is_loaded = "already loaded"

  def folder(self) -> str:
    return str(self._values_at("/model_info", "model_path")[0])

  def facts(self) -> Facts:
    dtype, longest = self._values_at("/server_info", "dtype", "max_req_input_len")
    # SGLang does not report which log-probs it returns. `score` finds out.
    return Facts(str(dtype), int(longest), "processed_logprobs", False, self.folder())

  def text(self, token: int) -> str:
    body = {"tokens": [token], "skip_special_tokens": False}
    return str(self._client.call("/detokenize", body, SHORT)["text"])

  def draw(self, ask: Ask, name: str = NAME) -> DrawnTokens:
    tokens, logprobs = list[int](), list[float]()
    while True:
      rest = ask._replace(prompt=[*ask.prompt, *tokens], most=ask.most - len(tokens))
      sampling = dict(
        max_new_tokens=rest.most,
        temperature=ask.temperature,
        sampling_seed=ask.seed,  # SGLang uses it only with --enable-deterministic-inference
        stop_token_ids=list(ask.stop_ids),
        stop=list(ask.stop),
        skip_special_tokens=False,  # a stop text may be a special token
      )
      meta = self._generate(rest.prompt, sampling, name, owner=ask)
      new_logprobs, new_tokens = _columns(meta.get("output_token_logprobs"))
      end = meta.get("finish_reason")  # {"type": "stop", "length" or "abort", "matched": ...}
      end = end if isinstance(end, dict) else {}
      new = checked(self.url, rest, new_tokens, new_logprobs, end.get("type"))
      tokens, logprobs = tokens + new.tokens, logprobs + new.logprobs
      # SGLang also stops at the end tokens of config.json and of its tokenizer. ignore_eos=True
      # would disable stop_token_ids, too. So a turn that such a token ended is continued here.
      matched = end.get("matched")
      has_stopped = new.has_stopped and (type(matched) is not int or matched in ask.stop_ids)
      if has_stopped or len(tokens) == ask.most:
        return DrawnTokens(tokens, logprobs, has_stopped)

  def score(self, rows: Sequence[Sequence[int]], name: str = NAME) -> list[list[float]]:
    # The scores belong to the row's own tokens. One more token is drawn at a high temperature, to
    # see which log-probs the server returns: if they include the temperature, the two likeliest
    # tokens have about the same log-prob.
    sampling, scores, difference = dict(max_new_tokens=1, temperature=_HOT), [], 0.0
    for row in rows:
      meta = self._generate(row, sampling, name, logprob_start_len=0, top_logprobs_num=2)
      # The first token has no log-prob.
      logprobs, _ = _columns((meta.get("input_token_logprobs") or [])[1:])
      likeliest, _ = _columns((meta.get("output_top_logprobs") or [None])[0])
      if not are_logprobs(logprobs, len(row) - 1) or not are_logprobs(likeliest, 2):
        raise ServerRefused(f"{self.url} scored a row with {shown(meta)}")
      scores.append(logprobs)
      difference = max(difference, likeliest[0] - likeliest[1])
    if difference > _MOST_DIFFERENCE:
      raise ServerRefused(
        f"{self.url} returns log-probs from before the temperature: start it with"
        " SGLANG_RETURN_ORIGINAL_LOGPROB=0, as python -m grpo_jax.engine --print writes it"
      )
    return scores

  def load(self, folder: str) -> None:
    # SGLang waits for rows in flight. The format is sent because a server that was started with
    # dummy weights would otherwise make up dummy weights again.
    body = {"model_path": folder, "load_format": "auto", "flush_cache": False}
    self._client.call("/update_weights_from_disk", body, self._seconds)
    # SGLang goes on decoding aborted rows for a moment, and cannot flush its cache until then.
    self._client.call(f"/flush_cache?timeout={SHORT:g}", {}, max(self._seconds, SHORT))

  def _generate(
    self,
    prompt: Sequence[int],
    sampling: Mapping[str, Any],
    name: str,
    owner: Any = None,
    **more: int,
  ) -> Mapping[str, Any]:
    """Samples a completion of one prompt. Returns meta_info, with its tokens and log-probs.

    `name` is an adapter, or NAME for none, and `owner` identifies the call for `drop`. `sampling`
    are SGLang's sampling_params, `more` further fields of the request.
    """
    body = {"input_ids": list(prompt), "sampling_params": {**_NO_FILTERS, **sampling}, **more}
    body |= {"return_logprob": True, "lora_path": None if name == NAME else name}
    answer = self._client.call("/generate", body, self._seconds, owner)
    if isinstance(answer, dict) and isinstance(answer.get("meta_info"), dict):
      return answer["meta_info"]
    raise ServerRefused(f"{self.url} answers /generate with {shown(answer)}")

  def _values_at(self, path: str, *keys: str) -> list[Any]:
    """Gets a JSON object from a path of the server, and returns the values of `keys` in it."""
    answer = self._client.call(path, seconds=SHORT)
    try:
      return [answer[key] for key in keys]
    except (KeyError, TypeError):
      names = " and ".join(keys)
      raise ServerRefused(
        f"{self.url} does not say {names} at {path} as SGLang 0.5.23 does"
      ) from None


def _columns(entries: Any) -> tuple[Any, Any]:
  """Splits entries (log-prob, token id, text) into (log-probs, token ids), or (None, None)."""
  try:
    return [entry[0] for entry in entries], [entry[1] for entry in entries]
  except (TypeError, IndexError, KeyError):
    return None, None


def environment(config: Config, on_cpu: bool) -> dict[str, str]:
  """Returns the environment variables of a server. The arguments are those of `EngineKind`."""
  # With _SPARE, the length may exceed the model's positions, which is harmless: no row is so long.
  found = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
  return found | ({"SGLANG_USE_CPU_ENGINE": "1"} if on_cpu else {})


def command(
  config: Config, url: str, folder: str = "", *, on_cpu: bool = False, program: str = ""
) -> list[str]:
  """Returns the command line of a server. The arguments are those of `server.WritesCommand`."""
  split, sampling, lora = urlsplit(url), config.sampling, config.lora
  found = [program or "python", "-m", "sglang.launch_server"]
  found += ["--model-path", folder or config.model.path]
  found += ["--host", split.hostname or "127.0.0.1", "--port", str(split.port)]
  found += ["--dtype", sampling.dtype or config.model.dtype]
  found += ["--context-length", str(longest_row(config) + _SPARE)]
  if config.data.tokenizer:
    found += ["--tokenizer-path", config.data.tokenizer]
  if config.rollout.engine_tensor > 1:
    found += ["--tp-size", str(config.rollout.engine_tensor)]
  if lora.rank:
    found += ["--enable-lora", "--max-lora-rank", str(lora.rank)]
    found += ["--lora-target-modules", *lora.targets]
  elif not folder:  # the run brings all weights, and with LoRA only adapters
    found += ["--load-format", "dummy"]
  return found + (["--device", "cpu"] if on_cpu else [])


ENGINE = EngineKind(
  SglangServer, command, environment, "SGLANG_API_KEY", "--context-length", _SPARE
)
