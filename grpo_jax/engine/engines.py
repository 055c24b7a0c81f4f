"""The engines by their names in rollout.engine. This module does not import jax."""

from collections.abc import Mapping, Sequence
import shlex

from grpo_jax.engine import sglang, vllm

ENGINES = {"vllm": vllm.ENGINE, "sglang": sglang.ENGINE}


def line(variables: Mapping[str, str], words: Sequence[str]) -> str:
  """Formats a command for a shell: the environment variables, then the quoted words."""
  return " ".join([*(f"{name}={value}" for name, value in variables.items()), shlex.join(words)])
