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

_SPARE = 7  # a prompt has at most --context-length tokens less these
_HOT = 1e4  # a temperature at which all tokens are equally likely
_MOST_DIFFERENCE = 0.02  # of the log-probs of two tokens at this temperature
# Its option --preferred-sampling-params could change them.
_NO_FILTERS = dict(top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0)
_NO_FILTERS |= dict(presence_penalty=0.0, frequency_penalty=0.0)


class SglangServer(EngineServer):
  """A server of SGLang, by the source of version 0.5.23. It was not run with SGLang."""

  load_adapter, unload_adapter = "/load_lora_adapter", "/unload_lora_adapter"
  is_loaded = "already loaded"

  def folder(self) -> str:
    return str(self._told("/model_info", "model_path")[0])

  def facts(self) -> Facts:
    dtype, longest = self._told("/server_info", "dtype", "max_req_input_len")
    # It does not report which log-probs it returns: `score` looks.
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
        sampling_seed=ask.seed,  # of --enable-deterministic-inference alone
        stop_token_ids=list(ask.stop_ids),
        stop=list(ask.stop),
        skip_special_tokens=False,  # a stop text may be one
      )
      meta = self._generate(rest.prompt, sampling, name, owner=ask)
      new_logprobs, new_tokens = _columns(meta.get("output_token_logprobs"))
      end = meta.get("finish_reason")
      end = end if isinstance(end, dict) else {}
      new = checked(self.url, rest, new_tokens, new_logprobs, end.get("type"))
      tokens, logprobs = tokens + new.tokens, logprobs + new.logprobs
      # It also stops at tokens that config.json and its tokenizer name. ignore_eos=True would let
      # it ignore stop_token_ids, too. So a row that ends at another token goes on.
      matched = end.get("matched")
      has_stopped = new.has_stopped and (type(matched) is not int or matched in ask.stop_ids)
      if has_stopped or len(tokens) == ask.most:
        return DrawnTokens(tokens, logprobs, has_stopped)

  def score(self, rows: Sequence[Sequence[int]], name: str = NAME) -> list[list[float]]:
    # The scores are those of the row's tokens. The one token that is drawn behind them at a high
    # temperature shows which log-probs the server returns: after that temperature, the two
    # likeliest tokens are about equally likely.
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
    # It waits for rows in flight. A server that was started without weights would go on to make
    # them up, so the format is named.
    body = {"model_path": folder, "load_format": "auto", "flush_cache": False}
    self._client.call("/update_weights_from_disk", body, self._seconds)
    # It draws for a moment after nobody waits for a row, and cannot drop its cache until then.
    self._client.call(f"/flush_cache?timeout={SHORT:g}", {}, max(self._seconds, SHORT))

  def _generate(
    self,
    prompt: Sequence[int],
    sampling: Mapping[str, Any],
    name: str,
    owner: Any = None,
    **more: int,
  ) -> Mapping[str, Any]:
    """Draws a row with log-probs. Returns the answer's meta_info."""
    body = {"input_ids": list(prompt), "sampling_params": {**_NO_FILTERS, **sampling}, **more}
    body |= {"return_logprob": True, "lora_path": None if name == NAME else name}
    answer = self._client.call("/generate", body, self._seconds, owner)
    if isinstance(answer, dict) and isinstance(answer.get("meta_info"), dict):
      return answer["meta_info"]
    raise ServerRefused(f"{self.url} answers /generate with {shown(answer)}")

  def _told(self, path: str, *keys: str) -> list[Any]:
    """The values of keys in what it says of itself at a path."""
    answer = self._client.call(path, seconds=SHORT)
    try:
      return [answer[key] for key in keys]
    except (KeyError, TypeError):
      names = " and ".join(keys)
      raise ServerRefused(
        f"{self.url} does not say {names} at {path} as SGLang 0.5.23 does"
      ) from None


def _columns(entries: Any) -> tuple[Any, Any]:
  """The log-probs and the token ids of entries (log-prob, token id, text), or (None, None)."""
  try:
    return [entry[0] for entry in entries], [entry[1] for entry in entries]
  except (TypeError, IndexError, KeyError):
    return None, None


def environment(config: Config, on_cpu: bool) -> dict[str, str]:
  """The environment variables of a server."""
  # _SPARE may be more than the model has positions. No row comes so far.
  found = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
  return found | ({"SGLANG_USE_CPU_ENGINE": "1"} if on_cpu else {})


def command(
  config: Config, url: str, folder: str = "", *, on_cpu: bool = False, program: str = ""
) -> list[str]:
  """The command line of a server. The arguments are those of `server.WritesCommand`."""
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
  elif not folder:
    found += ["--load-format", "dummy"]
  return found + (["--device", "cpu"] if on_cpu else [])


ENGINE = EngineKind(
  SglangServer, command, environment, "SGLANG_API_KEY", "--context-length", _SPARE
)
