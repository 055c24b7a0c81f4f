"""Optimizers by name, through optax: a schedule, clipping and one of `OPTIMIZERS`."""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import optax

from grpo_jax import model
from grpo_jax.config import Optimizer
from grpo_jax.registry import register
from grpo_jax.settings import ConfigError

# By optimizer.schedule: (learning rate, steps of the decay) -> a schedule of optax.
LEARNING_RATES: dict[str, Callable[[float, int], optax.Schedule]] = {
  "constant": lambda rate, steps: optax.constant_schedule(rate),
  "linear": lambda rate, steps: optax.linear_schedule(rate, 0.0, steps),
  "cosine": optax.cosine_decay_schedule,
}
# The defaults of optax for the decay of the second moment, for optimizer.b2=-1.
_B2 = {"lion": 0.99}
_B2_OF_OTHERS = 0.999
MATRIX_RMS = 0.2  # Muon's updates then have the size of AdamW's (2502.16982, section 2.2)


def make_optimizer(config: Optimizer, steps: int) -> optax.GradientTransformation:
  """The optimizer of a run: clips the gradient's norm, then applies the named optimizer.

  Args:
    config: The settings of the optimizer. Norms and biases are never decayed.
    steps: How many updates the run makes. A decaying schedule ends there.

  Raises:
    ConfigError: The name is not in OPTIMIZERS, or the optimizer does not support moments_dtype.
  """
  if config.name not in OPTIMIZERS:
    names = ", ".join(repr(name) for name in OPTIMIZERS)
    raise ConfigError(
      f"config key optimizer.name is {config.name!r}: choose one of {names}, or call"
      " grpo_jax.register_optimizer first"
    )
  if config.b2 < 0:
    config = dataclasses.replace(config, b2=_B2.get(config.name, _B2_OF_OTHERS))
  clip = optax.identity()
  if config.max_grad_norm:
    clip = optax.clip_by_global_norm(config.max_grad_norm)
  return optax.chain(clip, OPTIMIZERS[config.name](config, learning_rate(config, steps)))


def learning_rate(config: Optimizer, steps: int) -> optax.Schedule:
  """A function from the number of updates so far to the learning rate.

  After a linear warmup, the rate is constant, or decays linearly or as a cosine to 0 at update
  `steps`. The warmup does not start at 0, because an update with a rate of 0 would change nothing.
  """
  decay_steps = max(1, steps - config.warmup_steps)  # optax refuses 0 for a cosine
  after_warmup = LEARNING_RATES[config.schedule](config.learning_rate, decay_steps)
  if not config.warmup_steps:
    return after_warmup

  def warmup(count: jax.Array) -> jax.Array:
    return config.learning_rate * (count + 1) / (config.warmup_steps + 1)

  return optax.join_schedules([warmup, after_warmup], [config.warmup_steps])


def adamw(config: Optimizer, rate: optax.Schedule) -> optax.GradientTransformation:
  """AdamW (Loshchilov 1711.05101)."""
  return optax.adamw(
    rate,
    config.b1,
    config.b2,
    config.eps,
    mu_dtype=config.moments_dtype,
    weight_decay=config.weight_decay,
    mask=decayed,
  )


def lion(config: Optimizer, rate: optax.Schedule) -> optax.GradientTransformation:
  """Lion (Chen 2302.06675): one moment. Its learning rate is about a tenth of AdamW's."""
  return optax.lion(
    rate,
    config.b1,
    config.b2,
    mu_dtype=config.moments_dtype,
    weight_decay=config.weight_decay,
    mask=decayed,
  )


def sgd(config: Optimizer, rate: optax.Schedule) -> optax.GradientTransformation:
  """Gradient descent with momentum b1 and decoupled weight decay."""
  momentum = optax.identity()
  if config.b1:
    momentum = optax.trace(config.b1, accumulator_dtype=config.moments_dtype)
  else:
    _refuse_moments_dtype(config, "sgd with optimizer.b1=0 has no momentum")
  return optax.chain(
    momentum,
    optax.add_decayed_weights(config.weight_decay, decayed),
    optax.scale_by_learning_rate(rate),
  )


def adafactor(config: Optimizer, rate: optax.Schedule) -> optax.GradientTransformation:
  """Adafactor (Shazeer 1804.04235): factors a matrix's second moment into rows and columns.

  Updates are clipped to an RMS of 1, and are not scaled by the size of the parameters, so that the
  learning rate means the same as for AdamW.
  """
  _refuse_moments_dtype(config, "adafactor has no first moment")
  return optax.chain(
    optax.scale_by_factored_rms(),
    _clip_by_layer_rms(1.0),
    optax.add_decayed_weights(config.weight_decay, decayed),
    optax.scale_by_learning_rate(rate),
  )


def muon(config: Optimizer, rate: optax.Schedule) -> optax.GradientTransformation:
  """Muon (Jordan 2024; Liu 2502.16982) for the layers' matrices, AdamW for all else.

  optax decays only the matrices of Muon, so the embedding and the head have no weight decay.
  """
  return optax.contrib.muon(
    rate,
    weight_decay=config.weight_decay,
    weight_decay_mask=decayed,
    mu_dtype=config.moments_dtype,
    eps=config.eps,
    adam_b1=config.b1,
    adam_b2=config.b2,
    muon_weight_dimension_numbers=_matrix_axes,
    consistent_rms=MATRIX_RMS,
  )


Make = Callable[[Optimizer, optax.Schedule], optax.GradientTransformation]
OPTIMIZERS: dict[str, Make] = {
  "adamw": adamw,
  "adafactor": adafactor,
  "lion": lion,
  "muon": muon,
  "sgd": sgd,
}


def register_optimizer(make: Make) -> Make:
  """Registers a user's optimizer under its function's name, which `optimizer.name` can then select.

  It can be used as a decorator. A program that resumes a run must register the function first,
  because the run saves only the name.

  Args:
    make: (settings of the section `optimizer`, schedule of the learning rate) -> a transformation
      of optax. It need not clip, because `optimizer.max_grad_norm` does. `decayed` is the mask that
      keeps weight decay from norms and biases. The optimizer state may hold scalars and arrays with
      the shapes of parameters, which are sharded like the parameters.

  Returns:
    The function.

  Raises:
    ConfigError: An optimizer of grpo_jax has this name, or the function has no name.
  """
  register("optimizer", OPTIMIZERS, make, make)
  return make


def _refuse_moments_dtype(config: Optimizer, why: str) -> None:
  if config.moments_dtype != "float32":
    raise ConfigError(
      f"config key optimizer.moments_dtype is {config.moments_dtype!r}: {why}; set 'float32'"
    )


def _clip_by_layer_rms(threshold: float) -> optax.GradientTransformation:
  """optax.clip_by_block_rms, with each layer of a stack as a separate block."""
  clip = optax.clip_by_block_rms(threshold)

  def clip_parameter(path: tuple[Any, ...], update: jax.Array) -> jax.Array:
    def clip_block(block: jax.Array) -> jax.Array:
      return clip.update(block, optax.EmptyState())[0]

    return model.per_layer(clip_block, _name(path))(update)

  def clip_all(updates: Any, params: Any = None) -> Any:
    del params
    return jax.tree_util.tree_map_with_path(clip_parameter, updates)

  return optax.stateless(clip_all)


def _name(path: tuple[Any, ...]) -> str:
  """The path of a parameter, such as layers_0/mlp/up/kernel."""
  return "/".join(part.key for part in path if hasattr(part, "key"))


def decayed(params: Any) -> Any:
  """True for the parameters that weight decay applies to: all but scales of norms and biases.

  `balance` (the biases that even out the loads of experts), `layer_scale` and the limits to which
  projections are clipped are excluded, too, because they have no gradient. `decay` of the delta
  rule is excluded, because it is the logarithm of a rate, for which 0 is no neutral value.
  """

  def is_decayed(path: tuple[Any, ...], leaf: jax.Array) -> bool:
    del leaf
    name = path[-1].key
    return not name.endswith(("scale", "bias", "balance", "decay")) and "clip" not in name

  return jax.tree_util.tree_map_with_path(is_decayed, params)


def _matrix_axes(params: Any) -> Any:
  """Each parameter's input and output axes as a matrix, or None where AdamW updates it.

  The axes count from the end, because a stack of layers has one more axis in front.
  """

  def axes(path: tuple[Any, ...], leaf: jax.Array) -> Any:
    keys = [part.key for part in path if hasattr(part, "key")]
    is_vector = leaf.ndim < 2 + model.is_stacked("/".join(keys))
    if is_vector or {"embed", "head", "bias"} & set(keys):
      return None
    # The axes of heads are in the inputs of some projections, and in the outputs of others. An
    # adapter has the inputs in lora_a, and the outputs in lora_b.
    from_heads = bool({"o", "proj", "out"} & set(keys))
    has_heads = keys[-1] in ("kernel", "lora_a" if from_heads else "lora_b")
    in_attention = has_heads and "attention" in keys
    if in_attention and from_heads:  # [H, E, D]
      return optax.contrib.MuonDimensionNumbers((-3, -2), -1)
    if in_attention and "qkv" in keys:  # [D, 3, H, E]
      return optax.contrib.MuonDimensionNumbers(-4, (-3, -2, -1))
    if in_attention:  # [D, H, E]
      return optax.contrib.MuonDimensionNumbers(-3, (-2, -1))
    return optax.contrib.MuonDimensionNumbers(-2, -1)

  return jax.tree_util.tree_map_with_path(axes, params)
