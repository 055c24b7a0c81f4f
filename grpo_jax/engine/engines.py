"""The engines by their names in rollout.engine. It needs no jax."""

from collections.abc import Mapping, Sequence
import shlex

from grpo_jax.engine import sglang, vllm

ENGINES = {"vllm": vllm.ENGINE, "sglang": sglang.ENGINE}


def line(variables: Mapping[str, str], words: Sequence[str]) -> str:
  """A command as a shell reads it, after its environment variables."""
  return " ".join([*(f"{name}={value}" for name, value in variables.items()), shlex.join(words)])
