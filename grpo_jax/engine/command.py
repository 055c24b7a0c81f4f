"""The command line that starts a server for a config. It needs no jax."""

from collections.abc import Sequence
import shlex
from urllib.parse import urlsplit

from grpo_jax.config import Config
from grpo_jax.engine.vllm import NAME

_TOKENS_AT_ONCE = 4096  # of prompts, on CPUs
_UNTIED = '{"tie_word_embeddings": false}'


def environment(config: Config, on_cpu: bool) -> dict[str, str]:
  """The environment variables that a server needs."""
  found = {"VLLM_SERVER_DEV_MODE": "1"}  # routes that load weights
  if config.lora.rank:
    found["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
  if on_cpu:
    found |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "2"}
  return found


def command(
  config: Config, url: str, folder: str = "", *, on_cpu: bool = False, program: str = "vllm"
) -> list[str]:
  """The command line of a server.

  Args:
    config: The config of the run.
    url: The address at which it serves.
    folder: The model folder that it serves. "" is model.path, whose weights it does not read: the
      run brings them.
    on_cpu: Whether it computes on CPUs.
    program: The name or path of vLLM's program.
  """
  split, sampling = urlsplit(url), config.sampling
  found = [program, "serve", folder or config.model.path, "--served-model-name", NAME]
  found += ["--host", split.hostname or "127.0.0.1", "--port", str(split.port)]
  found += ["--dtype", sampling.dtype or config.model.dtype]
  # One more, because a prompt that is only scored is followed by a token.
  length = config.data.max_prompt_tokens + sampling.max_tokens + 1
  found += ["--max-model-len", str(length), "--seed", str(config.seed)]
  found += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
  if config.data.tokenizer:
    found += ["--tokenizer", config.data.tokenizer]
  if config.rollout.engine_tensor > 1:
    found += ["--tensor-parallel-size", str(config.rollout.engine_tensor)]
  if config.lora.rank:
    found += ["--enable-lora", "--max-lora-rank", str(_rank(config.lora.rank))]
  elif not folder:
    found += ["--load-format", "dummy"]
  if on_cpu:
    # vLLM 0.32 ends on CPUs when it splits the prompt of a row that has a seed.
    found += ["--enforce-eager", "--no-enable-chunked-prefill"]
    found += ["--max-num-batched-tokens", str(max(length, _TOKENS_AT_ONCE))]
    if not config.lora.rank:
      # vLLM 0.32 packs an output head for CPUs once, and never again if it is the embedding.
      found += ["--hf-overrides", _UNTIED]
  return found


def _rank(rank: int) -> int:
  """The smallest rank that vLLM has room for."""
  return next((size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= rank), rank)


def line(variables: dict[str, str], words: Sequence[str]) -> str:
  """A command as a shell reads it."""
  return " ".join([*(f"{name}={value}" for name, value in variables.items()), shlex.join(words)])
