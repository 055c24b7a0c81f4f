"""AdamW with a schedule and clipping, through optax."""

import jax
import optax

from grpo_jax.config import Optimizer

SCHEDULES = {  # after the warmup: (peak, updates left) -> schedule
  "constant": lambda peak, n: optax.constant_schedule(peak),
  "linear": lambda peak, n: optax.linear_schedule(peak, 0.0, n),
  "cosine": lambda peak, n: optax.cosine_decay_schedule(peak, n),
}


def learning_rate(config: Optimizer, steps: int) -> optax.Schedule:
  """Updates done -> learning rate: linear warmup, then constant, or linear or cosine to 0 at `steps`."""
  decay = SCHEDULES[config.schedule](config.learning_rate, max(1, steps - config.warmup_steps))
  if not config.warmup_steps:
    return decay
  # The first update already moves: at 0 it would be a step that changes nothing.
  warmup = lambda count: config.learning_rate * (count + 1) / (config.warmup_steps + 1)
  return optax.join_schedules([warmup, decay], [config.warmup_steps])


def make_optimizer(config: Optimizer, steps: int) -> optax.GradientTransformation:
  """AdamW (Loshchilov 1711.05101) of float32 master weights; norms and biases are not decayed."""
  matrices = lambda params: jax.tree_util.tree_map_with_path(
    lambda path, _: path[-1].key not in ("scale", "bias"), params
  )
  clip = (
    optax.clip_by_global_norm(config.max_grad_norm) if config.max_grad_norm else optax.identity()
  )
  return optax.chain(
    clip,
    optax.adamw(
      learning_rate(config, steps),
      config.b1,
      config.b2,
      config.eps,
      weight_decay=config.weight_decay,
      mask=matrices,
    ),
  )
