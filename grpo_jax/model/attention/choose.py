"""Chooses the implementation of attention that a run uses."""

import importlib

from grpo_jax.model.attention.view import AttendGroups

# Modules of this folder. All compute the same, to rounding.
ATTENTION = ("dense", "chunked", "splash", "cudnn")
KERNELS = ("splash", "cudnn")  # They do not read `View.pictures_PS`.
BEST = {"cpu": "dense", "tpu": "splash", "gpu": "cudnn"}

_CUDNN_MAX_HEAD_DIM = 128  # of GPUs before Hopper


def implementation(name: str) -> AttendGroups:
  """Imports the implementation of this name in ATTENTION, and returns its `attend`."""
  return importlib.import_module(f"grpo_jax.model.attention.{name}").attend


def completions(name: str) -> AttendGroups | None:
  """The attention of completions alone (see `by_rows.completions_by_rows`), with linear memory.

  None for `dense`, which holds all scores. `chunked` takes the place of an implementation without
  `attend_completions`, such as `cudnn`, which computes whole rows.
  """
  if name == "dense":
    return None
  module = importlib.import_module(f"grpo_jax.model.attention.{name}")
  attend = getattr(module, "attend_completions", None)
  return attend or completions("chunked")


def choose(
  name: str, platform: str, dtype: str, head_dim: int, cap: float = 0.0, sinks: bool = False
) -> tuple[str, str]:
  """Chooses an implementation that can compute the model's attention.

  Args:
    name: A name in ATTENTION, or "auto" for the best one of the platform.
    platform: The platform of the mesh's devices. It may differ from where the program is compiled.
    dtype: The dtype of the computation.
    head_dim: E.
    cap: The cap of the scores. 0 means none.
    sinks: Scores without a value take part in the softmax.

  Returns:
    A name in ATTENTION, and a sentence that tells the user why the wanted one is not used, or "".
  """
  wanted = BEST.get(platform, "chunked") if name == "auto" else name
  reason = why_not(wanted, platform, dtype, head_dim, cap, sinks)
  if not reason:
    return wanted, ""
  # `chunked` runs on every platform, and its memory is linear in the tokens, as a kernel's is.
  return "chunked", f"attention is computed in chunks, without a kernel: {reason}"


def why_not(
  name: str, platform: str, dtype: str, head_dim: int, cap: float, sinks: bool = False
) -> str:
  """Why the implementation cannot compute this, or "" if it can. Parameters are as in `choose`."""
  if name == "splash":
    return "" if platform == "tpu" else f"splash runs on TPUs, not on a {platform}"
  if name != "cudnn":
    return ""
  if platform != "gpu":
    return f"cudnn runs on GPUs, not on a {platform}"
  if dtype not in ("bfloat16", "float16"):
    return f"cudnn computes bfloat16 and float16, not {dtype}"
  if head_dim % 8 or head_dim > _CUDNN_MAX_HEAD_DIM:
    return f"cudnn takes heads of up to {_CUDNN_MAX_HEAD_DIM} in steps of 8, not {head_dim}"
  if sinks:
    return "cudnn has no attention sinks"
  return "cudnn cannot cap the scores" if cap else ""
