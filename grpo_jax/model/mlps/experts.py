"""A mixture of experts in place of a layer's MLP. It sorts tokens by expert and drops none."""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

from flax import linen as nn
from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.layers import ACTIVATIONS, RMSNorm, einsum
from grpo_jax.model.mlps.dense import MLP
from grpo_jax.model.mlps.router import Choice, Routed, Routes, route, statistics
from grpo_jax.model.on_devices import on_devices

_LANES = 128  # of a TPU
_MOST_INPUTS = 2048  # how many inputs of a matrix a kernel holds at a time

# Path in a layer -> the axis of the mesh that splits each dimension (see parallel/sharding.py).
RULES = (
  (r"experts/router", ("fsdp", None)),
  (r"experts/(router_bias|balance|router_scale|share_scale)", (None,)),
  (r"experts/(norm|post_norm|shared_post_norm)/scale", (None,)),
  (r"experts/(gate|up)_bias", ("expert", "tensor")),
  (r"experts/down_bias", ("expert", None)),
  (r"experts/shared_gate", (None,)),
  (r"experts/(gate|up)", ("expert", "fsdp", "tensor")),
  (r"experts/down", ("expert", "tensor", "fsdp")),
)


class ExpertWeights(NamedTuple):
  """The MLPs of X experts: all of them, or those that one device holds."""

  gate_XDM: jax.Array
  up_XDM: jax.Array
  down_XMD: jax.Array


class ExpertBiases(NamedTuple):
  """The biases of the same MLPs."""

  gate_XM: jax.Array
  up_XM: jax.Array
  down_XD: jax.Array


class InStacks(struct.PyTreeNode):
  """The experts of one layer, in the stacks [L, ...] of all layers.

  Attributes:
    weights: The stacks.
    place: int32 scalar, the number of the layer in its stack.
    platform: The platform of the devices. The kernel is emulated where it is not "tpu".
  """

  weights: ExpertWeights
  place: jax.Array
  platform: str = struct.field(pytree_node=False)


def in_stacks(config: ModelConfig, layer: Any, stacks: Any, place: jax.Array) -> Any:
  """Replaces a layer's experts by their whole stacks, if a TPU's kernel can read those in place.

  lax.ragged_dot reads a separate array, so XLA would copy the layer's experts out of the stack for
  each decoded token. If the weights are kept in another dtype than that of the computation, the
  copy converts just this layer, while reading in place would need the whole stack converted: then
  the layer stays as it is.

  Args:
    config: The model.
    layer: The parameters of one layer.
    stacks: The parameters of all layers, stacked.
    place: int32 scalar, the index of the layer in its stack.

  Returns:
    The parameters of the layer. With stacks, its experts also have the entry `place`.
  """
  if "experts" not in layer or not reads_stacks(config):
    return layer
  whole = {name: stacks["experts"][name] for name in ("gate", "up", "down")}
  if whole["gate"].dtype != config.dtype:
    return layer
  return layer | {"experts": layer["experts"] | whole | {"place": place}}


def reads_stacks(config: ModelConfig) -> bool:
  """Whether the kernel can read the model's experts: on a TPU, if their sizes fill its lanes."""
  return config.platform == "tpu" and config.embed_dim % _LANES == _width(config) % _LANES == 0


def _width(config: ModelConfig) -> int:
  """The hidden units of an expert that one device holds."""
  inner_axis = config.experts.spec[2] if config.experts is not None else None
  return config.expert_dim // (config.experts.mesh.shape[inner_axis] if inner_axis else 1)


class Experts(nn.Module):
  """The sum over a token's U experts x of p_x MLP_x(token), and the MLP that all tokens share.

  p are the shares that `route` returns. This follows Qwen3 (2505.09388) and DeepSeek-V3
  (2412.19437, section 2.1.2) in transformers.
  """

  config: ModelConfig

  @nn.compact
  def __call__(
    self, x_BTD: jax.Array, routes: Routes, residual_BTD: jax.Array
  ) -> tuple[jax.Array, Routed]:
    """Applies the experts and computes the router's statistics.

    Args:
      x_BTD: The tokens. All of them go through experts, whether counted or not.
      routes: The tokens that this layer's router counts, and the experts that replace its choice.
      residual_BTD: The tokens before their norm. With `config.expert_norms`, router and experts
        read these instead, each through its own norm.

    Returns:
      The output [B, T, D], and the router's results, whose arrays lack the axis L.
    """
    c = self.config
    # Weights are created first, because the order of parameters decides what a seed draws.
    weights, biases = self._weights(), self._biases()
    to_experts_BTD, to_router_BTD = x_BTD, x_BTD
    if c.expert_norms:
      to_experts_BTD = self._norm("norm", residual_BTD)
      scale_D = self.param("router_scale", nn.initializers.ones, (c.embed_dim,))
      to_router_BTD = self._norm("", residual_BTD) * (scale_D * c.embed_dim**-0.5).astype(c.dtype)
    logits_BTX, balance_X = self._router(to_router_BTD)
    given_BTU = routes.given if routes.replays else None
    choice = _route_on_mesh(c)(logits_BTX, balance_X, given_BTU)
    shares_BTU = choice.shares_BTU
    if c.expert_norms:
      scale_X = self.param("share_scale", nn.initializers.ones, (c.num_experts,))
      shares_BTU = shares_BTU * scale_X[choice.used_BTU]
    mix = _mix_on_mesh(c)
    out_BTD = mix(to_experts_BTD, choice.used_BTU, shares_BTU.astype(c.dtype), weights, biases)
    if c.expert_norms:
      out_BTD = self._norm("post_norm", out_BTD)
    if c.shared_dim:
      out_BTD = out_BTD + self._shared(x_BTD)
    sums = None if routes.counted_BT is None else statistics(choice, routes)
    return out_BTD, Routed(sums, choice.used_BTU if c.keeps_experts else None)

  def _shared(self, x_BTD: jax.Array) -> jax.Array:
    """The output of the MLP that all tokens share, which is added to the experts' output."""
    c = self.config
    shared_BTD, _ = MLP(c, c.shared_dim, name="shared")(x_BTD)
    if c.shared_gate:
      gate_D = self.param("shared_gate", nn.initializers.zeros, (c.embed_dim,)).astype(c.dtype)
      gate_BT = nn.sigmoid(einsum("btd,d->bt", x_BTD, gate_D)).astype(c.dtype)
      shared_BTD = shared_BTD * gate_BT[..., None]
    return self._norm("shared_post_norm", shared_BTD) if c.expert_norms else shared_BTD

  def _norm(self, name: str, x_BTD: jax.Array) -> jax.Array:
    """An RMS norm. With the name "", it has no scale."""
    c = self.config
    norm = RMSNorm(epsilon=c.norm_eps, dtype=c.dtype, use_scale=bool(name), name=name or None)
    return norm(x_BTD)

  def _router(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """The router's logits, and the biases [X] of scores when experts are chosen, or None."""
    c = self.config
    D, X = c.embed_dim, c.num_experts
    router_DX = self.param("router", nn.initializers.lecun_normal(), (D, X)).astype(c.dtype)
    logits_BTX = einsum("btd,dx->btx", x_BTD, router_DX)
    if c.router_bias:
      logits_BTX = logits_BTX + self.param("router_bias", nn.initializers.zeros, (X,))
    if c.router != "sigmoid":
      return logits_BTX, None
    return logits_BTX, self.param("balance", nn.initializers.zeros, (X,))

  def _weights(self) -> ExpertWeights | InStacks:
    """The experts' weights of this layer, or the stacks of all layers (see `in_stacks`)."""
    c = self.config
    X, D, M = c.num_experts, c.embed_dim, c.expert_dim
    per_expert = nn.initializers.lecun_normal(batch_axis=0)
    if self.has_variable("params", "place"):
      stacks: Any = (self.get_variable("params", name) for name in ("gate", "up", "down"))
      place: Any = self.get_variable("params", "place")
      return InStacks(ExpertWeights(*stacks), place, c.platform)
    return ExpertWeights(
      self.param("gate", per_expert, (X, D, M)).astype(c.dtype),
      self.param("up", per_expert, (X, D, M)).astype(c.dtype),
      self.param("down", per_expert, (X, M, D)).astype(c.dtype),
    )

  def _biases(self) -> ExpertBiases | None:
    c = self.config
    if not c.expert_bias:
      return None
    shapes = {"gate_bias": c.expert_dim, "up_bias": c.expert_dim, "down_bias": c.embed_dim}
    zeros = nn.initializers.zeros
    biases = (self.param(name, zeros, (c.num_experts, size)) for name, size in shapes.items())
    return ExpertBiases(*(bias.astype(c.dtype) for bias in biases))


def _route_on_mesh(config: ModelConfig) -> Callable[..., Choice]:
  """Returns `route` for tokens that are split over a mesh: each device routes its own tokens.

  Otherwise XLA's CPU compiler gathers the scores of all tokens, because it cannot split `top_k`.
  """
  route_here = functools.partial(route, config)
  if config.context == 1:
    return route_here
  tokens: Any = config.rows.spec
  in_specs = tokens, PartitionSpec(), tokens
  return on_devices(route_here, config.rows.mesh, in_specs, tokens)


def _mix_on_mesh(config: ModelConfig) -> Callable[..., jax.Array]:
  """Returns `mix` for rows and experts that are split over a mesh.

  The devices along the expert axis hold different experts. Each of them gathers the rows of the
  others, computes the contribution of its own experts to all these rows, and the contributions to
  each row are summed on the device that holds the row.
  """
  mix_here = functools.partial(mix, ACTIVATIONS[config.activation])
  if config.rows is None:
    return mix_here
  rows = config.rows.spec
  expert_axis, _, inner_axis = config.experts.spec

  def gather(x: jax.Array) -> jax.Array:
    return jax.lax.all_gather(x, expert_axis, tiled=True)

  def mix_local(
    x_BTD: jax.Array,
    chosen_BTU: jax.Array,
    mixture_BTU: jax.Array,
    weights: ExpertWeights | InStacks,
    biases: ExpertBiases | None,
  ) -> jax.Array:
    """`mix` on one device: adds up the results of the devices that have other experts or units."""
    if biases and inner_axis:  # the psum below adds this bias once for each device
      size = jax.lax.axis_size(inner_axis)
      biases = biases._replace(down_XD=biases.down_XD / size)
    if inner_axis and not isinstance(weights, InStacks):  # decoding with stacks has no gradient
      # Each device along the inner axis holds some of the hidden units of its experts, and computes
      # their part of the gradients of x and mixture. The gradient of this pcast adds up the parts.
      x_BTD, mixture_BTU = jax.lax.pcast((x_BTD, mixture_BTU), inner_axis, to="varying")
      if biases:
        down_XD = jax.lax.pcast(biases.down_XD, inner_axis, to="varying")
        biases = biases._replace(down_XD=down_XD)
    if expert_axis:
      x_BTD, chosen_BTU, mixture_BTU = gather(x_BTD), gather(chosen_BTU), gather(mixture_BTU)
      # From here on, 0 is this device's first expert.
      chosen_BTU = chosen_BTU - jax.lax.axis_index(expert_axis) * _experts_of(weights)
    out_BTD = mix_here(x_BTD, chosen_BTU, mixture_BTU, weights, biases)
    if inner_axis:
      out_BTD = jax.lax.psum(out_BTD, inner_axis)
    if expert_axis:
      out_BTD = jax.lax.psum_scatter(out_BTD, expert_axis, tiled=True)
    return out_BTD

  def mix_on_mesh(*args: Any) -> jax.Array:
    *_, weights, biases = args
    in_specs = rows, rows, rows, *_specs(config, weights, biases)
    # A kernel's output does not say over which axes it varies.
    check_vma = not isinstance(weights, InStacks)
    return on_devices(mix_local, config.rows.mesh, in_specs, rows, check_vma=check_vma)(*args)

  return mix_on_mesh


def _specs(
  config: ModelConfig, weights: ExpertWeights | InStacks, biases: ExpertBiases | None
) -> tuple[Any, Any]:
  """The partition specs of the experts' weights and biases on the mesh.

  All matrices of an expert are split along M, so that one device computes both the inputs and the
  outputs of a hidden unit. `InStacks` holds the weights of all layers, with an axis of layers in
  front, and the index of this layer (`place`), which every device has.
  """
  expert_axis, _, inner_axis = config.experts.spec

  def of_weights(*stack_axis: None) -> Any:
    inward = PartitionSpec(*stack_axis, expert_axis, None, inner_axis)
    outward = PartitionSpec(*stack_axis, expert_axis, inner_axis, None)
    specs: Any = dict(gate_XDM=inward, up_XDM=inward, down_XMD=outward)
    return ExpertWeights(**specs)

  specs: Any = of_weights()
  if isinstance(weights, InStacks):
    specs = weights.replace(weights=of_weights(None), place=PartitionSpec())
  if biases is None:
    return specs, None
  hidden: Any = PartitionSpec(expert_axis, inner_axis)
  out: Any = PartitionSpec(expert_axis, None)
  return specs, ExpertBiases(gate_XM=hidden, up_XM=hidden, down_XD=out)


def mix(
  activation: Callable[[jax.Array, jax.Array], jax.Array],
  x_BTD: jax.Array,
  chosen_BTU: jax.Array,
  mixture_BTU: jax.Array,
  weights: ExpertWeights | InStacks,
  biases: ExpertBiases | None = None,
) -> jax.Array:
  """The contribution of the experts in `weights` to the output of every token.

  Args:
    activation: (gate, up) -> hidden units.
    x_BTD: The tokens.
    chosen_BTU: int32, the experts of each token, counted from the first one in `weights`. Experts
      outside of 0 to X - 1 are not in `weights` and contribute 0.
    mixture_BTU: The factors of these experts' outputs in the sum.
    weights: The MLPs of X experts.
    biases: The biases of these MLPs, or None.

  Returns:
    [B, T, D] in the dtype of `x_BTD`.
  """
  X, D, U = _experts_of(weights), x_BTD.shape[-1], chosen_BTU.shape[-1]
  is_here_BTU = (chosen_BTU >= 0) & (chosen_BTU < X)
  # N = B * T * U pairs of a token and an expert. X sorts the pairs of other experts to the end.
  experts_N = jnp.where(is_here_BTU, chosen_BTU, X).ravel()
  order_N = jnp.argsort(experts_N)
  inverse_N = jnp.argsort(order_N)
  sizes_X = jnp.bincount(experts_N, length=X).astype(jnp.int32)
  # ragged_dot computes nothing for the rows after its last group, here those of other experts.
  # Their contents depend on the platform, so they are set to 0.
  is_here_N = jnp.arange(len(experts_N)) < sizes_X.sum()
  repeated_ND = jnp.repeat(x_BTD.reshape(-1, D), U, axis=0)
  tokens_ND = _where(is_here_N, _permuted(repeated_ND, order_N, inverse_N))
  product, (gate, up, down) = _product_with(weights)
  gate_NM, up_NM = product(tokens_ND, gate, sizes_X), product(tokens_ND, up, sizes_X)
  if biases:
    sorted_experts_N = experts_N[order_N]  # X, for other devices' experts, reads the last bias
    gate_NM = gate_NM + biases.gate_XM[sorted_experts_N]
    up_NM = up_NM + biases.up_XM[sorted_experts_N]
  out_ND = product(activation(gate_NM, up_NM), down, sizes_X)
  if biases:
    out_ND = out_ND + biases.down_XD[sorted_experts_N]
  sorted_out_ND = _where(is_here_N, out_ND)
  out_BTUD = _permuted(sorted_out_ND, inverse_N, order_N).reshape(*chosen_BTU.shape, D)
  return einsum("btud,btu->btd", out_BTUD, mixture_BTU).astype(x_BTD.dtype)


def _experts_of(weights: ExpertWeights | InStacks) -> int:
  """X, the experts of a layer."""
  stacks = weights.weights if isinstance(weights, InStacks) else weights
  return stacks.gate_XDM.shape[-3]


def _product_with(weights: ExpertWeights | InStacks) -> tuple[Callable[..., Any], ExpertWeights]:
  """A function product(x_NI, matrices, sizes_X) -> [N, O], and the matrices that it takes."""
  if isinstance(weights, InStacks):
    interpret = weights.platform != "tpu"
    return functools.partial(product_in_stack, weights.place, interpret=interpret), weights.weights
  return jax.lax.ragged_dot, weights


def product_in_stack(
  place: jax.Array,
  x_NI: jax.Array,
  stack_LXIO: jax.Array,
  sizes_X: jax.Array,
  interpret: bool = False,
) -> jax.Array:
  """lax.ragged_dot(x, stack[place], sizes), by JAX's TPU kernel, which reads the stack in place.

  Args:
    place: int32 scalar, the index of the layer.
    x_NI: Rows, sorted by expert.
    stack_LXIO: The experts' matrices of all layers.
    sizes_X: int32, the number of rows of each expert. The results of further rows are undefined.
    interpret: Emulate the kernel, so that it runs on any platform.
  """
  from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm  # here, because only TPUs need it

  N, (L, X, I, O) = len(x_NI), stack_LXIO.shape
  padded = jnp.pad(x_NI, [(0, -N % _LANES), (0, 0)])
  # The largest block of outputs that divides them. `reads_stacks` checked that _LANES does.
  outputs = next(size for size in (512, 256, _LANES) if O % size == 0)
  out = gmm(
    padded,
    stack_LXIO.reshape(L * X, I, O),
    sizes_X,
    preferred_element_type=x_NI.dtype,
    tiling=(_LANES, min(I, _MOST_INPUTS), outputs),  # the rows, inputs and outputs of a block
    # The kernel reads matrix number (expert - offset), hence the minus.
    group_offset=-place * X,
    interpret=interpret,
  )
  return out[:N]


@jax.custom_vjp
def _permuted(x_ND: jax.Array, order_N: jax.Array, inverse_N: jax.Array) -> jax.Array:
  """x[order], whose gradient is dy[inverse]. JAX's own gradient would be a scatter."""
  return x_ND[order_N]


def _permuted_forward(
  x_ND: jax.Array, order_N: jax.Array, inverse_N: jax.Array
) -> tuple[jax.Array, jax.Array]:
  return x_ND[order_N], inverse_N


def _permuted_backward(inverse_N: jax.Array, dy_ND: jax.Array) -> tuple[jax.Array, None, None]:
  return dy_ND[inverse_N], None, None


_permuted.defvjp(_permuted_forward, _permuted_backward)


@jax.custom_vjp
def _where(is_kept_N: jax.Array, x_ND: jax.Array) -> jax.Array:
  """Zeros the rows that are not kept. The backward pass of jnp.where would hold a mask [N, D]."""
  return jnp.where(is_kept_N[:, None], x_ND, 0)


def _where_forward(is_kept_N: jax.Array, x_ND: jax.Array) -> tuple[jax.Array, jax.Array]:
  return _where(is_kept_N, x_ND), is_kept_N


def _where_backward(is_kept_N: jax.Array, dy_ND: jax.Array) -> tuple[None, jax.Array]:
  return None, _where(is_kept_N, dy_ND)


_where.defvjp(_where_forward, _where_backward)
