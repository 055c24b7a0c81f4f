"""The layers of vision towers as Flax Linen modules. vision_shape.py describes the differences.

In this folder, B counts pictures, N their patches, W is the width of the tower, A its heads and E
the size of a head. grpo_jax/types.py has the other letters.
"""

from collections.abc import Callable
import math

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.kernels import Target
from grpo_jax.model.layers import Dense, RMSNorm
from grpo_jax.model.rope import Rotation, rotate
from grpo_jax.model.towers.attention import attend

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
  "gelu": lambda x: nn.gelu(x, approximate=False),
  "gelu_tanh": lambda x: nn.gelu(x, approximate=True),
  "silu": nn.silu,
}
# Path in the tower -> the axis of the mesh that splits each dimension (see parallel/sharding.py).
RULES = (
  (r"embed/patch/kernel", (None, None, None, "fsdp")),
  (r"embed/patch/kernel", (None, None, None, None, "fsdp")),
  (r"embed/patch/bias", (None,)),
  (r"embed/positions", (None, "fsdp")),
  (r"embed/positions", (None, None, "fsdp")),  # one table for rows, and one for columns
  (r"embed/patch/kernel", (None, "fsdp")),
  (r".*norm\d?/(scale|bias)", (None,)),
  (r"layers_\d+/attention/qkv/kernel", ("fsdp", None, "tensor", None)),
  (r"layers_\d+/attention/qkv/bias", (None, "tensor", None)),
  (r"layers_\d+/attention/[qkv](/linear)?/kernel", ("fsdp", "tensor", None)),
  (r"layers_\d+/attention/[qkv]/bias", ("tensor", None)),
  (r"layers_\d+/attention/(o/linear|proj|out)/kernel", ("tensor", None, "fsdp")),
  (r"layers_\d+/attention/(proj|out)/bias", (None,)),
  (r"layers_\d+/mlp/(up|gate|fc1)(/linear)?/kernel", ("fsdp", "tensor")),
  (r"layers_\d+/mlp/(up|gate|fc1)/bias", ("tensor",)),
  (r"layers_\d+/mlp/(down|fc2)(/linear)?/kernel", ("tensor", "fsdp")),
  (r"layers_\d+/mlp/(down|fc2)/bias", (None,)),
  (r"layers_\d+/(attention/(qkv|q|k|v)|mlp/(up|gate|fc1))/lora_a", ("fsdp", None)),
  (r"layers_\d+/attention/qkv/lora_b", (None, None, "tensor", None)),
  (r"layers_\d+/attention/[qkv]/lora_b", (None, "tensor", None)),
  (r"layers_\d+/attention/(proj|out)/lora_a", ("tensor", None, None)),
  (r"layers_\d+/mlp/(up|gate|fc1)/lora_b", (None, "tensor")),
  (r"layers_\d+/mlp/(down|fc2)/lora_a", ("tensor", None)),
  (r"layers_\d+/(attention/(proj|out)|mlp/(down|fc2))/lora_b", (None, "fsdp")),
  (r"(merge|levels_\d+)/up/kernel", ("fsdp", "tensor")),
  (r"(merge|levels_\d+)/up/bias", ("tensor",)),
  (r"(merge|levels_\d+)/down/kernel", ("tensor", "fsdp")),
  (r"(merge|levels_\d+)/down/bias", (None,)),
  (r"merge/projection/kernel", ("fsdp", None)),
)
# Path in a layer of the tower -> the projection, which can have an adapter if the tower is trained.
TARGETS = {
  "attention/qkv": Target(("qkv",)),
  "attention/proj": Target(("proj",), inputs=2),
  **{f"attention/{x}": Target((f"{x}_proj",)) for x in "qkv"},
  "attention/out": Target(("out_proj",), inputs=2),
  **{f"mlp/{x}": Target((f"{x}_proj",)) for x in ("gate", "up", "down")},
  **{f"mlp/{x}": Target((f"linear_{x}", x)) for x in ("fc1", "fc2")},
}


def layer_norm(config: ModelConfig, name: str) -> nn.Module:
  """A layer norm of the tower, with mean and bias. Its statistics are float32."""
  epsilon = config.vision.norm_eps
  return nn.LayerNorm(epsilon=epsilon, dtype=config.dtype, use_fast_variance=False, name=name)


def rms_norm(config: ModelConfig, name: str) -> nn.Module:
  """An RMS norm of the tower, without mean and bias."""
  return RMSNorm(epsilon=config.vision.norm_eps, dtype=config.dtype, name=name)


def projected_patches(config: ModelConfig, patches_BNC: jax.Array, use_bias: bool) -> jax.Array:
  """[B, N, W]: a linear projection of each patch, whose kernel has the axes of a convolution's."""
  v = config.vision
  patches = patches_BNC.reshape(*patches_BNC.shape[:2], *v.patch)
  return Dense(config, (v.dim,), axes=len(v.patch), use_bias=use_bias, name="patch")(patches)


def position_table(module: nn.Module, config: ModelConfig) -> jax.Array:
  """The learned positions of the module `module`, float32 [positions, W], row by row."""
  v = config.vision
  return module.param("positions", nn.initializers.normal(0.02), (v.positions, v.dim))


def sizes_of(places_BN2: jax.Array) -> jax.Array:
  """int32 [B, 1, 2]: how many rows and columns of patches each picture has, at least 1."""
  return jnp.maximum(places_BN2.max(1, keepdims=True) + 1, 1)


class TowerAttention(nn.Module):
  """Softmax attention of patches that see each other in both directions, with biases.

  With `joined`, one projection computes queries, keys and values.
  """

  config: ModelConfig
  joined: bool

  @nn.compact
  def __call__(self, x_BNW: jax.Array, rope: Rotation | None, seen_BN: jax.Array) -> jax.Array:
    """Returns [B, N, W]. A patch attends to the patches with the same number in `seen_BN`."""
    c, v = self.config, self.config.vision
    heads = v.num_heads, v.head_dim
    if self.joined:
      qkv = Dense(c, (3, *heads), use_bias=True, name="qkv")(x_BNW)
      q_BNAE, k_BNAE, v_BNAE = (qkv[..., i, :, :] for i in range(3))
      out_name = "proj"  # the name in the checkpoints of such towers
    else:
      out_name = "out"
      q_BNAE, k_BNAE, v_BNAE = (Dense(c, heads, use_bias=True, name=x)(x_BNW) for x in "qkv")
    if rope is not None:
      q_BNAE, k_BNAE = rotate(q_BNAE, rope), rotate(k_BNAE, rope)
    q_BNAE = q_BNAE / math.sqrt(v.head_dim)
    out_BNAE = attend(c, q_BNAE, k_BNAE, v_BNAE, seen_BN)
    return Dense(c, (v.dim,), axes=2, use_bias=True, name=out_name)(out_BNAE)


class TowerMLP(nn.Module):
  """fc2(activation(fc1 x)), or with `gated` down(activation(gate x) * up x), with biases."""

  config: ModelConfig
  gated: bool

  @nn.compact
  def __call__(self, x_BNW: jax.Array) -> jax.Array:
    c, v = self.config, self.config.vision
    activation = ACTIVATIONS[v.activation]

    def project(name: str, width: int, x: jax.Array) -> jax.Array:
      return Dense(c, (width,), use_bias=True, name=name)(x)

    if not self.gated:
      return project("fc2", v.dim, activation(project("fc1", v.mlp_dim, x_BNW)))
    gate_BNI, up_BNI = project("gate", v.mlp_dim, x_BNW), project("up", v.mlp_dim, x_BNW)
    return project("down", v.dim, activation(gate_BNI) * up_BNI)


def place_rotation(config: ModelConfig, places_BN2: jax.Array) -> Rotation:
  """The rotation of patches: half of the pairs rotate by the row, the others by the column."""
  v = config.vision
  half = v.head_dim // 2
  frequencies = v.rope_theta ** -(np.arange(0, half, 2, dtype=np.float32) / half)
  angles_BN2F = places_BN2[..., None].astype(jnp.float32) * frequencies
  angles_BNF = angles_BN2F.reshape(*places_BN2.shape[:2], -1)
  return Rotation(jnp.cos(angles_BNF), jnp.sin(angles_BNF))


class TowerLayer(nn.Module):
  """Attention, then an MLP, each with a normalised input and added to the residual stream.

  Attributes:
    norm: `layer_norm` or `rms_norm`.
    joined: As in `TowerAttention`.
    gated: As in `TowerMLP`.
  """

  config: ModelConfig
  norm: Callable[[ModelConfig, str], nn.Module]
  joined: bool
  gated: bool

  @nn.compact
  def __call__(self, x_BNW: jax.Array, rope: Rotation | None, seen_BN: jax.Array) -> jax.Array:
    c = self.config
    attention = TowerAttention(c, self.joined, name="attention")
    x_BNW = x_BNW + attention(self.norm(c, "norm1")(x_BNW), rope, seen_BN)
    return x_BNW + TowerMLP(c, self.gated, name="mlp")(self.norm(c, "norm2")(x_BNW))


def in_blocks(x_BNW: jax.Array, places_BN2: jax.Array, side: int) -> jax.Array:
  """Groups patches into blocks of side * side: [B, N / side^2, side^2, W].

  Patches are ordered row by row. So are the blocks, and the patches of a block. The entries after a
  picture's last block are meaningless.
  """
  B, N, W = x_BNW.shape
  block_M1, inner = jnp.arange(N // side**2)[:, None], jnp.arange(side**2)
  # At least one block, so that pictures that are padding do not divide by 0.
  columns_B11 = jnp.maximum(sizes_of(places_BN2)[..., 1:], side)
  blocks_B11 = columns_B11 // side
  row_BMS = block_M1 // blocks_B11 * side + inner // side
  column_BMS = block_M1 % blocks_B11 * side + inner % side
  source_BMS = jnp.minimum(row_BMS * columns_B11 + column_BMS, N - 1)
  source_BN1 = source_BMS.reshape(B, -1, 1)
  return jnp.take_along_axis(x_BNW, source_BN1, axis=1).reshape(B, -1, side**2, W)


class Merger(nn.Module):
  """Each run of merge^2 patches becomes one visual token: down(gelu(up norm(x))), with biases.

  Attributes:
    norm: `layer_norm` or `rms_norm`.
    norm_after: The merge^2 patches are normalised after they are joined to one vector.
  """

  config: ModelConfig
  norm: Callable[[ModelConfig, str], nn.Module]
  norm_after: bool = False

  @nn.compact
  def __call__(self, x_BNW: jax.Array, places_BN2: jax.Array) -> jax.Array:
    """Returns [B, N / merge^2, D]. The patches of a visual token are neighbours on the axis N."""
    del places_BN2
    c, v = self.config, self.config.vision
    joined = x_BNW.shape[0], -1, v.merged_dim
    norm = self.norm(c, "norm")
    x = norm(x_BNW.reshape(joined)) if self.norm_after else norm(x_BNW).reshape(joined)
    hidden = ACTIVATIONS["gelu"](Dense(c, (v.merged_dim,), use_bias=True, name="up")(x))
    return Dense(c, (c.embed_dim,), use_bias=True, name="down")(hidden)
