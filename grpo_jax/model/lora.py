"""Low-rank adapters (LoRA, Hu et al. 2106.09685): y = x W + scale (x A) B.

Only A and B are trained, and W is frozen.
A tree of parameters with adapters is the frozen tree with two more leaves beside each adapted
kernel: lora_a [inputs..., r] and lora_b [r, outputs...]. `join` makes such a tree without a copy.
The frozen W may be quantised (QLoRA 2305.14314).
"""

from collections.abc import Iterable
import math
from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict
import jax
import jax.numpy as jnp

from grpo_jax.model import mixers, mlps, towers
from grpo_jax.model.config import ModelConfig
from grpo_jax.model.kernels import dequantised
from grpo_jax.model.stacks import TOWER, layer_names, stacked
from grpo_jax.settings import ConfigError

QUANTISED_DTYPES = ("int8", "int4", "nf4")  # dtypes of a frozen base, besides float32 and bfloat16
TILE = 64  # how many weights along an input axis share a scale
# Path of a kernel in a layer, such as "attention/q" -> the projection.
TARGETS = mixers.TARGETS | mlps.TARGETS
# The same for the projections of vision towers.
_OF_TOWER = {TOWER + path: target for path, target in towers.TARGETS.items()}
_ALL = TARGETS | _OF_TOWER


def _adaptable() -> dict[str, tuple[str, ...]]:
  """Computes ADAPTABLE from the targets of all projections."""
  kernels: dict[str, set[str]] = {}
  for path, target in _ALL.items():
    for module in target.modules:
      kernels.setdefault(module, set()).add(_last(path))
  return {module: tuple(sorted(names)) for module, names in kernels.items()}


def _last(path: str) -> str:
  return path.split("/")[-1]


# Module of Hugging Face -> the kernels that it holds: "q_proj" -> ("q",), "qkv_proj" -> three.
ADAPTABLE = _adaptable()
_MODULES = {_last(path): target.modules[0] for path, target in (_OF_TOWER | TARGETS).items()}


def kernels_of(modules: Iterable[str]) -> tuple[str, ...]:
  """The kernels that these keys of ADAPTABLE hold, sorted, for `AdapterShape.targets`."""
  return tuple(sorted({kernel for module in modules for kernel in ADAPTABLE[module]}))


def modules_of(kernels: Iterable[str]) -> tuple[str, ...]:
  """Keys of ADAPTABLE that hold these kernels. The inverse of `kernels_of`."""
  return tuple(dict.fromkeys(_MODULES[kernel] for kernel in kernels))


def init_adapters(key: jax.Array, config: ModelConfig, base: Any) -> Any:
  """Creates float32 adapters for the projections that `config.lora` names.

  A ~ U(-1/sqrt(inputs), 1/sqrt(inputs)) and B = 0, as in PEFT. With B = 0 the policy computes the
  same as the base. The adapters are stacked like the base.

  Args:
    key: The random key from which A is drawn.
    config: The model, with `config.lora`.
    base: The frozen parameters, or their shapes.

  Raises:
    ConfigError: The model lacks one of the projections, or the projection cannot have an adapter.
  """
  # Each layer has its own kernels, and keys are given out in the order of their names. So what a
  # seed draws does not depend on how layers are stacked.
  kernel_shapes = {
    name: leaf.shape[1:]
    for stack, leaf in flatten_dict(base, sep="/").items()
    if can_adapt(stack, config) and _last(_path(stack)) in config.lora.targets
    for name in layer_names(stack, config)
  }
  missing = set(config.lora.targets) - {_last(_path(name)) for name in kernel_shapes}
  if missing:
    module, *_ = modules_of(sorted(missing))
    raise ConfigError(
      f"config key lora.targets: the model has no projection {module} that can have an adapter"
      " (experts cannot, and a vision tower only with model.vision=trained): leave it out"
    )
  leaves = {}
  names = sorted(kernel_shapes)
  for name, kernel_key in zip(names, jax.random.split(key, len(names)), strict=True):
    inputs, outputs = _split_shape(name, kernel_shapes[name])
    shape_a, shape_b = (*inputs, config.lora.rank), (config.lora.rank, *outputs)
    bound = 1 / math.sqrt(math.prod(inputs))
    prefix = name.removesuffix("kernel")
    leaves[prefix + "lora_a"] = jax.random.uniform(kernel_key, shape_a, jnp.float32, -bound, bound)
    leaves[prefix + "lora_b"] = jnp.zeros(shape_b, jnp.float32)
  return stacked(unflatten_dict(leaves, sep="/"), config)


def join(base: Any, trained: Any) -> Any:
  """One tree with the leaves of both trees. The leaves are not copied. `base` may be None."""
  if base is None or not isinstance(trained, dict):
    return trained
  return base | {name: join(base.get(name, {}), inner) for name, inner in trained.items()}


def merged(kernel: Any, a: jax.Array | None, b: jax.Array | None, scale: float) -> jax.Array:
  """W + scale A B for one layer: a kernel equal to W with its adapter. W if `a` is None.

  The result is always a new float32 array.
  """
  weights = jnp.array(dequantised(kernel, jnp.float32))
  return weights if a is None else weights + scale * jnp.tensordot(a, b, 1)


def quantised(name: str, leaf: jax.Array, dtype: str) -> Any:
  """Converts a leaf of the frozen parameters, for one layer, to the dtype of the frozen base.

  With a dtype in QUANTISED_DTYPES, only the kernels of TARGETS are quantised, and other leaves
  become bfloat16. Every TILE weights along the last input axis share a scale, separately for each
  output. Vectors always stay float32: they are small, and some lose much in bfloat16, such as
  Gemma's norms, whose leaf is 1 + w with a w near 0. Leaves with an axis of heads are no vectors.

  Args:
    name: The path of the leaf, such as "layers_0/attention/q/kernel".
    leaf: float32.
    dtype: float32, bfloat16 or a name in QUANTISED_DTYPES.

  Returns:
    A jax.Array or a qwix.QArray.
  """
  if leaf.ndim <= 1:
    return leaf.astype("float32")
  if dtype not in QUANTISED_DTYPES or not is_projection(name):
    return leaf.astype("bfloat16" if dtype in QUANTISED_DTYPES else dtype)
  import qwix  # here, because models that are not quantised do not need it

  inputs, _ = _split_shape(name, leaf.shape)
  tiled = len(inputs) - 1  # the last input axis
  tile = math.gcd(inputs[tiled], TILE)  # it must divide the axis
  other_axes = [axis for axis in range(leaf.ndim) if axis != tiled]
  return qwix.quantize(
    leaf, dtype, channelwise_axes=other_axes, tiled_axes={tiled: tile}, scale_dtype=jnp.bfloat16
  )


def rounded(name: str, kernel: jax.Array) -> Any:
  """Quantises a kernel of TARGETS, for one layer, to int8 with one scale for each output.

  These scales can multiply the product, so the kernel is never dequantised (`kernels.factors`).
  """
  import qwix  # as in `quantised`

  _, outputs = _split_shape(name, kernel.shape)
  first = kernel.ndim - len(outputs)
  return qwix.quantize(kernel, "int8", channelwise_axes=range(first, kernel.ndim))


def is_projection(name: str) -> bool:
  """Whether this leaf of the decoder is a kernel that can have an adapter and be quantised."""
  return name.endswith("/kernel") and _path(name) in TARGETS


def can_adapt(name: str, config: ModelConfig) -> bool:
  """Whether this leaf is a kernel that can have an adapter. A tower's must be trained."""
  if is_projection(name):
    return True
  is_trained = config.vision is not None and config.vision.trained
  return is_trained and name.endswith("/kernel") and _path(name) in _OF_TOWER


def adaptable_modules(base: Any, config: ModelConfig) -> tuple[str, ...]:
  """The keys of ADAPTABLE for the adaptable kernels in `base`, frozen parameters, sorted."""
  names = [name for name in flatten_dict(base, sep="/") if can_adapt(name, config)]
  return tuple(sorted(modules_of(_last(_path(name)) for name in names)))


def _path(name: str) -> str:
  """The key of TARGETS for "layers_0/attention/q/kernel", such as "attention/q"."""
  of_tower = TOWER if name.startswith(TOWER) else ""
  return of_tower + "/".join(name.removeprefix(TOWER).split("/")[1:-1])


def _split_shape(name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """The input axes and the output axes of a kernel."""
  inputs = _ALL[_path(name)].inputs
  return shape[:inputs], shape[inputs:]
