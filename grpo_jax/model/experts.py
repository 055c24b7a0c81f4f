"""A mixture of experts in the place of a layer's MLP: dropless, its tokens sorted by expert."""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.layers import ACTIVATIONS, einsum
from grpo_jax.types import Routing


class Experts(nn.Module):
  """sum over a token's A likeliest experts of p_x MLP_x(token), p the router's softmax (Qwen3 2505.09388, as transformers)."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x_BTD, counted_BT):
    """-> [B, T, D], and what the router did with the tokens where counted_BT is not 0; None for counted_BT None."""
    c = self.config
    X, D, M = c.num_experts, c.embed_dim, c.expert_dim
    initial = nn.initializers.lecun_normal(batch_axis=0)
    weights = [
      self.param(name, initial, (X, *shape)).astype(c.dtype)
      for name, shape in (("gate", (D, M)), ("up", (D, M)), ("down", (M, D)))
    ]
    router_DX = self.param("router", nn.initializers.lecun_normal(), (D, X)).astype(c.dtype)
    probs_BTX = jax.nn.softmax(einsum("btd,dx->btx", x_BTD, router_DX))
    shares_BTA, chosen_BTA = jax.lax.top_k(probs_BTX, c.experts_per_token)
    if c.normalise_shares:
      shares_BTA = shares_BTA / shares_BTA.sum(-1, keepdims=True)
    out_BTD = _on_mesh(c)(x_BTD, chosen_BTA, shares_BTA.astype(c.dtype), *weights)
    return out_BTD, None if counted_BT is None else _routing(probs_BTX, chosen_BTA, counted_BT)


def _routing(probs_BTX, chosen_BTA, counted_BT):
  counts = (counted_BT != 0)[..., None]
  given_BTX = (chosen_BTA[..., None] == jnp.arange(probs_BTX.shape[-1])).any(-2)
  p_BTX = jax.lax.stop_gradient(probs_BTX)
  entropy_BTX = jnp.where(counts, -p_BTX * jnp.log(jnp.maximum(p_BTX, 1e-30)), 0)
  return Routing(
    counts.sum((1, 2)).astype(jnp.float32),
    (given_BTX & counts).sum(1).astype(jnp.float32),
    jnp.where(counts, probs_BTX, 0).sum(1),
    entropy_BTX.sum((1, 2)),
  )


def _on_mesh(config):
  """`_mix` of rows and experts that lie on a mesh. A device gathers the rows of those that hold other experts, computes its
  experts' part of them, and gives each its sum."""
  mix = functools.partial(_mix, ACTIVATIONS[config.activation])
  if config.rows is None:
    return mix
  rows, (expert, _, inner) = config.rows.spec, config.experts.spec

  def local(x_BTD, chosen_BTA, shares_BTA, gate, up, down):
    if expert:
      gather = lambda x: jax.lax.all_gather(x, expert, tiled=True)
      x_BTD, chosen_BTA, shares_BTA = gather(x_BTD), gather(chosen_BTA), gather(shares_BTA)
      chosen_BTA = chosen_BTA - jax.lax.axis_index(expert) * gate.shape[0]
    out_BTD = mix(x_BTD, chosen_BTA, shares_BTA, gate, up, down)
    out_BTD = jax.lax.psum(out_BTD, inner) if inner else out_BTD
    return jax.lax.psum_scatter(out_BTD, expert, tiled=True) if expert else out_BTD

  inwards, outwards = PartitionSpec(expert, None, inner), PartitionSpec(expert, inner, None)
  return jax.shard_map(
    local,
    mesh=config.rows.mesh,
    in_specs=(rows,) * 3 + (inwards, inwards, outwards),
    out_specs=rows,
  )


def _mix(activation, x_BTD, chosen_BTA, shares_BTA, gate_XDM, up_XDM, down_XMD):
  """The part of experts 0 to X - 1, those that are given; a token's other experts add nothing."""
  A, D, X = chosen_BTA.shape[-1], x_BTD.shape[-1], gate_XDM.shape[0]
  ids = jnp.where((chosen_BTA >= 0) & (chosen_BTA < X), chosen_BTA, X).ravel()
  order = jnp.argsort(ids)
  place = jnp.argsort(order)
  sizes_X = jnp.bincount(ids, length=X).astype(jnp.int32)
  # What ragged_dot makes of the rows after its groups, those of no expert here, is up to the platform.
  ours = (jnp.arange(len(ids)) < sizes_X.sum())[:, None]
  tokens = jnp.where(ours, _permuted(jnp.repeat(x_BTD.reshape(-1, D), A, axis=0), order, place), 0)
  hidden = activation(jax.lax.ragged_dot(tokens, gate_XDM, sizes_X)) * jax.lax.ragged_dot(
    tokens, up_XDM, sizes_X
  )
  out = _permuted(jnp.where(ours, jax.lax.ragged_dot(hidden, down_XMD, sizes_X), 0), place, order)
  return einsum("btad,bta->btd", out.reshape(*chosen_BTA.shape, D), shares_BTA).astype(x_BTD.dtype)


@jax.custom_vjp
def _permuted(x_ND, order_N, inverse_N):
  """x[order], whose gradient is dy[inverse]: left alone, it would be a scatter."""
  return x_ND[order_N]


_permuted.defvjp(
  lambda x_ND, order_N, inverse_N: (x_ND[order_N], inverse_N),
  lambda inverse_N, dy_ND: (dy_ND[inverse_N], None, None),
)
