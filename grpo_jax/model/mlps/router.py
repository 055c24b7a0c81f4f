"""Which experts a token goes through, the instructions to routers, and their statistics."""

from typing import NamedTuple

from flax import struct
import jax
import jax.numpy as jnp

from grpo_jax.model.config import ModelConfig
from grpo_jax.types import Routing


class Routes(struct.PyTreeNode):
  """The instructions to the routers of a pass: which tokens to count, and which experts to take.

  Attributes:
    counted_BT: The statistics count a token where this is not 0. None skips the statistics.
    given: The experts that replace the router's choice: integers [B, T, U] for one layer, or
      [B, T, Y] for all sparse layers of a pass. The router chooses where they are -1, or everywhere
      if this is None.
    compared_BT: Where this is not 0, the statistics compare a token's given experts with those that
      the router would choose. Read only beside `given`.
    replays: False: tokens go through the router's choice, and `given` is only compared with it.
  """

  counted_BT: jax.Array | None = None
  given: jax.Array | None = None
  compared_BT: jax.Array | None = None
  replays: bool = struct.field(pytree_node=False, default=True)


class Routed(NamedTuple):
  """The results of routers: their statistics, and the experts that they chose.

  Attributes:
    sums: The statistics, or None where `Routes.counted_BT` is None.
    experts_BTU: int32, the experts of each token with `config.keeps_experts`, otherwise None.
  """

  sums: Routing | None = None
  experts_BTU: jax.Array | None = None


class Choice(NamedTuple):
  """The experts of a layer's tokens.

  Attributes:
    probs_BTX: float32, the router's probabilities, whose sum is 1.
    own_BTU: int32, the experts that the router chooses.
    used_BTU: int32, the experts that the tokens go through.
    shares_BTU: float32, the factors of these experts' outputs.
  """

  probs_BTX: jax.Array
  own_BTU: jax.Array
  used_BTU: jax.Array
  shares_BTU: jax.Array


def route(
  config: ModelConfig,
  logits_BTX: jax.Array,
  balance_X: jax.Array | None,
  given_BTU: jax.Array | None = None,
) -> Choice:
  """Chooses the experts of each token, and computes their shares of the token's output.

  The scores are the softmax or, with "sigmoid", the sigmoids of the logits. The experts with the
  largest scores are chosen. "sigmoid" first adds each expert's bias, which keeps loads even, and
  considers only the groups whose two best experts have the largest sum (2412.19437, eq. 13-16).

  Args:
    config: The model.
    logits_BTX: float32.
    balance_X: The biases of the experts, or None with "softmax". They change which experts are
      chosen, not their shares.
    given_BTU: Experts that replace the chosen ones, or -1 to keep those. Their shares come from the
      scores of this pass, with the gradient (R3, 2510.11370).
  """
  c = config
  if c.router == "softmax":
    probs_BTX = scores_BTX = jax.nn.softmax(logits_BTX)
    shares_BTU, own_BTU = jax.lax.top_k(scores_BTX, c.experts_per_token)
  else:
    scores_BTX = jax.nn.sigmoid(logits_BTX)
    probs_BTX = scores_BTX / scores_BTX.sum(-1, keepdims=True)
    # `balance_X` follows the loads, not a gradient, and a choice of experts has no gradient.
    wanted_BTX = jax.lax.stop_gradient(scores_BTX + balance_X)
    if c.router_groups > 1:
      wanted_BTX = _in_best_groups(wanted_BTX, c.router_groups, c.router_groups_used)
    _, own_BTU = jax.lax.top_k(wanted_BTX, c.experts_per_token)
    shares_BTU = jnp.take_along_axis(scores_BTX, own_BTU, axis=-1)
  used_BTU = own_BTU
  if given_BTU is not None:
    used_BTU = jnp.where(given_BTU >= 0, given_BTU, own_BTU)
    shares_BTU = jnp.take_along_axis(scores_BTX, used_BTU, axis=-1)
  if c.normalise_shares:
    shares_BTU = shares_BTU / shares_BTU.sum(-1, keepdims=True)
  return Choice(probs_BTX, own_BTU, used_BTU, shares_BTU * c.share_scale)


def _in_best_groups(wanted_BTX: jax.Array, groups: int, used: int) -> jax.Array:
  """`wanted_BTX` with -inf for experts outside of each token's `used` best groups."""
  of_group = wanted_BTX.reshape(*wanted_BTX.shape[:-1], groups, -1)
  best_two, _ = jax.lax.top_k(of_group, 2)
  _, best_groups = jax.lax.top_k(best_two.sum(-1), used)
  is_best = (best_groups[..., None] == jnp.arange(groups)).any(-2)
  return jnp.where(is_best[..., None], of_group, -jnp.inf).reshape(wanted_BTX.shape)


def statistics(choice: Choice, routes: Routes) -> Routing:
  """The router's statistics of one layer: sums over the counted tokens of each row."""
  counted_BT1, probs_BTX = (routes.counted_BT != 0)[..., None], choice.probs_BTX
  assigned_BTX = (choice.used_BTU[..., None] == jnp.arange(probs_BTX.shape[-1])).any(-2)
  compared_BL, differs_BL = _differences(choice, routes)
  fixed_probs_BTX = jax.lax.stop_gradient(probs_BTX)  # the entropy is only a metric
  # p log p is 0 at p = 0. Without the bound it would be 0 * -inf.
  logprobs_BTX = jnp.log(jnp.maximum(fixed_probs_BTX, 1e-30))
  entropy_BTX = jnp.where(counted_BT1, -fixed_probs_BTX * logprobs_BTX, 0)
  return Routing(
    tokens_BL=counted_BT1.sum((1, 2)).astype(jnp.float32),
    assigned_BLX=(assigned_BTX & counted_BT1).sum(1).astype(jnp.float32),
    probs_BLX=jnp.where(counted_BT1, probs_BTX, 0).sum(1),
    entropy_BL=entropy_BTX.sum((1, 2)),
    compared_BL=compared_BL,
    differs_BL=differs_BL,
  )


def _differences(choice: Choice, routes: Routes) -> tuple[jax.Array, jax.Array] | tuple[None, None]:
  """Counts each row's compared tokens, and those whose experts the router would not choose."""
  if routes.given is None or routes.compared_BT is None:
    return None, None
  compared_BT = (routes.compared_BT != 0) & (routes.given[..., 0] >= 0)
  differs_BT = (jnp.sort(choice.own_BTU) != jnp.sort(routes.given)).any(-1)
  return compared_BT.sum(1, dtype=jnp.float32), (differs_BT & compared_BT).sum(1, dtype=jnp.float32)
