"""Which arrays of a layer are kept for the backward pass, which computes the others again."""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

OFFLOAD = "offload"
_LAYER_INPUT = "layer_input"


def named_input(x_BTD: jax.Array) -> jax.Array:
  """Names the input of a layer, so that `policy_of("offload")` finds it."""
  return checkpoint_name(x_BTD, _LAYER_INPUT)


def policy_of(remat: str) -> Callable[..., Any]:
  """The policy of `jax.checkpoint` for a name in jax.checkpoint_policies, or for "offload".

  With "offload", the input of each layer is in the host's memory until the backward pass reaches
  the layer, and nothing else is kept.
  """
  if remat == OFFLOAD:
    return jax.checkpoint_policies.save_and_offload_only_these_names(
      names_which_can_be_saved=[],
      names_which_can_be_offloaded=[_LAYER_INPUT],
      offload_src="device",
      offload_dst="pinned_host",
    )
  return getattr(jax.checkpoint_policies, remat)
