"""The shape of a decoder as data. Model families differ in these fields; the code is the same."""

import dataclasses
import math
from typing import NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from grpo_jax.model.on_devices import split_already
from grpo_jax.model.rope import RopeScaling
from grpo_jax.model.vision_shape import VisionShape

# The mesh axis that splits the slots of a cache and the tokens of prompts, in meshes that have it.
SLOTS_AXIS = "slots"


@dataclasses.dataclass(frozen=True)
class AdapterShape:
  """The shape of LoRA adapters (see `grpo_jax/model/lora.py`).

  Attributes:
    rank: The rank r of the adapters.
    alpha: The numerator of `scale`.
    rslora: Scale by alpha / sqrt(rank) instead of alpha / rank (rank-stabilised LoRA, Kalajdzievski
      2312.03732). Higher ranks need it.
    targets: The names of the kernels that have an adapter, sorted. Layers may share a name.
  """

  rank: int
  alpha: float
  rslora: bool
  targets: tuple[str, ...]

  @property
  def scale(self) -> float:
    """The factor of the adapter's product A B."""
    return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclasses.dataclass(frozen=True)
class DeltaShape:
  """The shape of a layer that mixes tokens by the gated delta rule (see `mixers/delta.py`).

  Attributes:
    key_heads: J.
    value_heads: I, a multiple of J.
    key_dim: A, the size of a key and of a query.
    value_dim: B, the size of a value.
    width: How many tokens the convolution spans, the token itself included.
  """

  key_heads: int
  value_heads: int
  key_dim: int
  value_dim: int
  width: int

  @property
  def channels(self) -> int:
    """How many numbers of a token go through the convolution: its queries, keys and values."""
    return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclasses.dataclass(frozen=True)
class LatentShape:
  """The shape of multi-head latent attention (see `mixers/latent.py`).

  Attributes:
    rank: The size of a latent.
    query_rank: The size of the vector from which queries are computed. 0: from the token itself.
    key_dim: How many numbers of a key are computed from the latent.
    rope_dim: How many numbers of a key are rotated. All heads share them. E is their number plus
      `key_dim`.
    value_dim: The size of a value.
    interleaved: Neighbouring numbers are rotated as a pair, instead of numbers half a head apart.
  """

  rank: int
  query_rank: int
  key_dim: int
  rope_dim: int
  value_dim: int
  interleaved: bool


class LayerKind(NamedTuple):
  """The properties by which layers of a model differ. Layers of one kind can be scanned.

  Attributes:
    mixer: How tokens read earlier tokens: a name in `mixers.MIXERS`.
    window: How many tokens a token attends to, itself included. 0 means all earlier tokens.
    rotated: Queries and keys are rotated.
    mlp: How each token is computed by itself: a name in `mlps.MLPS`.
    keys: The keys and values that queries attend to: "own", "lent" (own, which later layers
      borrow), or "borrowed" (those of the lending layer with the same window).
    keys_as_values: The keys, before they are normalised and rotated, are also the values.
    num_kv_heads: K.
    head_dim: E.
    mlp_dim: F.
  """

  mixer: str
  window: int
  rotated: bool
  mlp: str
  keys: str
  keys_as_values: bool
  num_kv_heads: int
  head_dim: int
  mlp_dim: int

  @property
  def parts(self) -> tuple[str, ...]:
    """The names in `TensorSpec.layers` that include this layer. They say which tensors it has."""
    has_keys = self.mixer == "attention" and self.keys != "borrowed"
    keys = ("keys",) if has_keys else ()
    values = ("values",) if has_keys and not self.keys_as_values else ()
    return "all", self.mixer, self.mlp, *keys, *values


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The shape of a decoder, and how it is computed.

  Attributes:
    vocab_size: V.
    embed_dim: D.
    num_layers: L.
    num_heads: H.
    num_kv_heads: K.
    head_dim: E.
    mlp_dim: F.
    rope_theta: The base of the rotary frequencies.
    norm_eps: The epsilon of the RMS norms.
    tie_embeddings: The embedding is also the head.
    max_positions: The largest number of tokens of prompt and completion together.

    family: The `model_type` of Hugging Face whose tensor names `save` writes.
    qkv_bias: The query, key and value projections have a bias.
    o_bias: The output projection of attention has a bias.
    output_gate: The output of attention is multiplied by sigmoid(gate), which the query projection
      computes beside each query.
    mlp_bias: The projections of the MLP have a bias.
    qk_norm: How queries and keys are normalised before they are rotated: "head" each head by
      itself, "all" all heads together, "" not at all.
    activation: A name in `layers.ACTIVATIONS`.
    pre_norms: The inputs of attention and MLP are normalised.
    post_norms: The outputs of attention and MLP are normalised before they are added to the
      residual stream.
    scale_embeddings: Embeddings are multiplied by sqrt(D).
    embedding_multiplier: A factor of the embeddings.
    residual_multiplier: A factor of the outputs of attention and MLP.
    query_scalar: Queries are divided by the square root of this number. 0 stands for E.
    query_multiplier: If not 0, queries are multiplied by this number instead.
    attention_cap: Attention scores become cap * tanh(score / cap). 0 leaves them as they are.
    attention_sinks: Each query head has a score that takes part in its softmax and brings no value.
    logit_cap: The same as `attention_cap` for logits.
    logit_divisor: The number by which logits are divided.
    rope_scaling: How the rotary frequencies are scaled for long texts, or None.
    windows: For each layer, how many tokens a token attends to, itself included. 0 means all
      earlier tokens. The empty tuple means 0 for every layer.
    local_rope_theta: The base of the rotary frequencies in the layers that have a window. 0 means
      that they use `rope_theta` and `rope_scaling`.
    local_rope_scaling: How these frequencies are scaled, or None.
    query_growth: Queries are multiplied by 1 + query_growth * log(1 + floor(position / original)),
      with the original positions of `rope_scaling`. 0 means that they are not.
    rotary_dim: How many numbers of a head, the first ones, are rotated. 0 stands for E.
    unrotated_layers: The layers whose queries and keys are not rotated.
    global_head_dim: E of the layers without a window. 0 stands for `head_dim`.
    global_kv_heads: K of the layers without a window. 0 stands for `num_kv_heads`.
    keys_as_values: In the layers without a window, the keys before their norm are also the values.
    value_norm: Each head of the values is normalised, without a scale.
    borrowing_layers: How many layers at the end of the model compute no keys and values. They
      borrow those of the last layer before them that has the same window.
    wide_borrowers: The MLPs of the layers that borrow have twice as many hidden units.
    layer_scale: The output of each layer is multiplied by a factor that is not trained.
    per_layer_dim: N, the size of a token's embedding for each layer (see `layer_embeddings.py`). 0
      means that there are none.
    mixers: For each layer, how it mixes tokens: a name in `mixers.MIXERS`. The empty tuple means
      attention in every layer.
    delta: The shape of the layers with the gated delta rule, or None.
    latent: The shape of the layers with latent attention, or None.
    labels: N, the outputs of a reward model's head: 1 is the score of a text, 2 are the logits of
      "this step is wrong" and "this step is right". 0 means a language model.
    num_experts: X. In the layers of `sparse_layers`, experts replace the MLP.
    experts_per_token: U.
    expert_dim: M.
    normalise_shares: The weights of a token's U experts are divided by their sum. Otherwise they
      are the router's scores.
    share_scale: A factor by which these weights are then multiplied.
    router: How logits become scores: "softmax" over all experts, or "sigmoid", which also adds a
      bias of each expert that balances the loads (see `mlps.router.route`).
    router_bias: The logits of the router have a bias.
    router_groups: The number of groups that the experts are divided into.
    router_groups_used: In how many of the groups, each token's best ones, experts are chosen.
    expert_bias: The projections of experts have a bias.
    shared_dim: The hidden units of an MLP that every token goes through beside the experts. 0
      means that there is none.
    shared_gate: The output of this MLP is multiplied by sigmoid(gate), one number for each token.
    expert_norms: Experts and router read the residual stream through separate norms, and the
      outputs of experts and shared MLP are normalised. Factors scale the router's inputs, and the
      shares of each expert.
    sparse_layers: The layers that have experts.
    vision: The shape of the vision tower, or None for a model of text alone.
    stop_ids: The token ids that end a text (`eos_token_id` of the checkpoint).

    dtype: The dtype of the computation. Master weights are float32.
    cache_dtype: "int8" keeps the keys and values of decoded tokens as int8, "" in `dtype`.
    attention: A name in `attention.ATTENTION`, or "auto" for the platform's best implementation.
    length: An upper bound on the tokens of a text in this computation, or 0 if it is not known. If
      it is known, the angles of the rotary embedding come from a table.
    completion_tokens: The most tokens of a completion in the run, or 0 if it is not known. The
      learner needs it where a batch is cut to fewer tokens, because scalings of the rotary
      embedding depend on the longest text.
    text_tokens: The length that the scalings of the rotary embedding take for all texts of the run,
      or 0 if it depends on the batch.
    keeps_experts: `routed_features` also returns the experts of each token.
    unrolled: Each layer has separate arrays, instead of being stacked with other layers.
    lora: The adapters of the policy on top of frozen parameters. None means that all parameters are
      trained.

    rows: The sharding of activations [B, T, ...]: over their rows and, if the mesh has an axis
      `context`, over their tokens. In this and the two fields below, None lets XLA choose.
    table: The sharding of the embedding while tokens are looked up in it.
    experts: The sharding of the [X, D, M] weights while tokens go through the experts.
  """

  vocab_size: int
  embed_dim: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_dim: int
  rope_theta: float = 10000.0
  norm_eps: float = 1e-6
  tie_embeddings: bool = True
  max_positions: int = 32768
  # How families differ:
  family: str = "qwen2"
  qkv_bias: bool = True
  o_bias: bool = False
  output_gate: bool = False
  mlp_bias: bool = False
  qk_norm: str = ""
  activation: str = "silu"
  pre_norms: bool = True
  post_norms: bool = False
  scale_embeddings: bool = False
  embedding_multiplier: float = 1.0
  residual_multiplier: float = 1.0
  query_scalar: float = 0.0
  query_multiplier: float = 0.0
  attention_cap: float = 0.0
  attention_sinks: bool = False
  logit_cap: float = 0.0
  logit_divisor: float = 1.0
  rope_scaling: RopeScaling | None = None
  windows: tuple[int, ...] = ()
  local_rope_theta: float = 0.0
  local_rope_scaling: RopeScaling | None = None
  query_growth: float = 0.0
  rotary_dim: int = 0
  unrotated_layers: tuple[int, ...] = ()
  global_head_dim: int = 0
  global_kv_heads: int = 0
  keys_as_values: bool = False
  value_norm: bool = False
  borrowing_layers: int = 0
  wide_borrowers: bool = False
  layer_scale: bool = False
  per_layer_dim: int = 0
  mixers: tuple[str, ...] = ()
  delta: DeltaShape | None = None
  latent: LatentShape | None = None
  labels: int = 0
  num_experts: int = 0
  experts_per_token: int = 0
  expert_dim: int = 0
  normalise_shares: bool = False
  share_scale: float = 1.0
  router: str = "softmax"
  router_bias: bool = False
  router_groups: int = 0
  router_groups_used: int = 0
  expert_bias: bool = False
  shared_dim: int = 0
  shared_gate: bool = False
  expert_norms: bool = False
  sparse_layers: tuple[int, ...] = ()
  vision: VisionShape | None = None
  stop_ids: tuple[int, ...] = ()
  # How the model is computed:
  dtype: str = "float32"
  cache_dtype: str = ""
  attention: str = "auto"
  length: int = 0
  completion_tokens: int = 0
  text_tokens: int = 0
  keeps_experts: bool = False
  unrolled: bool = False
  lora: AdapterShape | None = None
  rows: jax.sharding.NamedSharding | None = None
  table: jax.sharding.NamedSharding | None = None
  experts: jax.sharding.NamedSharding | None = None

  @property
  def has_axes(self) -> bool:
    """Whether tokens have a position on each of several axes, such as time, height and width."""
    return self.vision is not None and bool(self.vision.rope_sections)

  @property
  def has_frozen_tower(self) -> bool:
    """Whether there is a vision tower that updates do not change."""
    return self.vision is not None and not self.vision.trained

  def sees_both_ways(self, window: int) -> bool:
    """Whether a picture's tokens also see its later tokens, in layers of this window (0: none)."""
    both_ways = self.vision.both_ways if self.vision else ""
    return both_ways == "all" or (both_ways == "windows" and window > 0)

  @property
  def row_shards(self) -> int:
    """The number of parts into which the mesh splits the rows of activations."""
    if self.rows is None:
      return 1
    mesh_shape = self.rows.mesh.shape
    return math.prod(mesh_shape[axis] for axis in self.rows.spec[0])

  @property
  def within_shard_map(self) -> "ModelConfig":
    """The model within a `shard_map`, whose axes have already split the rows."""
    split = split_already()
    if self.rows is None or not split:
      return self
    row_axes, *rest = self.rows.spec
    left = PartitionSpec(tuple(axis for axis in row_axes if axis not in split), *rest)
    return dataclasses.replace(self, rows=NamedSharding(self.rows.mesh, left))

  @property
  def context(self) -> int:
    """The number of devices over which the tokens of a text are split."""
    has_tokens = self.rows is not None and len(self.rows.spec) > 1
    return self.rows.mesh.shape[self.rows.spec[1]] if has_tokens else 1

  @property
  def slot_shards(self) -> int:
    """The number of devices over which the slots of each row's cache are split."""
    return 1 if self.rows is None else self.rows.mesh.shape.get(SLOTS_AXIS, 1)

  @property
  def split_along_slots(self) -> "ModelConfig":
    """The model with the tokens of a text split over the devices that split the slots of a row."""
    if self.slot_shards == 1:
      return self
    tokens = PartitionSpec(self.rows.spec[0], SLOTS_AXIS)
    return dataclasses.replace(self, rows=NamedSharding(self.rows.mesh, tokens))

  def slots_axis(self, slots: int) -> str | None:
    """The mesh axis over which this number of slots of a cache is split, or None."""
    return SLOTS_AXIS if self.slot_shards > 1 and slots % self.slot_shards == 0 else None

  def axis_of(self, heads: int) -> str | None:
    """The mesh axis over which this number of heads is split, or None if heads are not split."""
    if self.on_one_device or heads % self.rows.mesh.shape["tensor"]:
      return None
    return "tensor"

  @property
  def on_one_device(self) -> bool:
    """Whether no activation is split over devices."""
    return self.rows is None or self.rows.mesh.size == 1

  @property
  def experts_in_all(self) -> int:
    """Y, the experts that a token uses in all layers."""
    return len(self.sparse_layers) * self.experts_per_token

  @property
  def experts_dtype(self) -> str:
    """The smallest integer dtype that holds the numbers of all experts, and -1."""
    return "int8" if self.num_experts <= 2**7 else "int16"

  @property
  def platform(self) -> str:
    """The platform of the mesh's devices, such as "cpu", or "" without a mesh."""
    return self.rows.mesh.devices.flat[0].platform if self.rows is not None else ""

  def kind(self, layer: int) -> LayerKind:
    """The kind of the layer of this number: how it mixes tokens, and with which sizes."""
    window = self.windows[layer] if self.windows else 0
    borrows = layer >= self.num_layers - self.borrowing_layers
    K, E = self.num_kv_heads, self.head_dim
    if not window:
      K, E = self.global_kv_heads or K, self.global_head_dim or E
    return LayerKind(
      mixer=self.mixers[layer] if self.mixers else "attention",
      window=window,
      rotated=layer not in self.unrotated_layers,
      mlp="experts" if layer in self.sparse_layers else "mlp",
      keys="borrowed" if borrows else "lent" if self._lends(layer) else "own",
      keys_as_values=self.keys_as_values and not window,
      num_kv_heads=K,
      head_dim=E,
      mlp_dim=2 * self.mlp_dim if borrows and self.wide_borrowers else self.mlp_dim,
    )

  def _lends(self, layer: int) -> bool:
    """Whether a layer is the last one with its window before the borrowing layers."""
    if not self.borrowing_layers:
      return False
    windows = self.windows or (0,) * self.num_layers
    return windows[layer] not in windows[layer + 1 : self.num_layers - self.borrowing_layers]

  def of_layer(self, kind: LayerKind) -> "ModelConfig":
    """This config with the sizes of one kind of layer."""
    return dataclasses.replace(
      self,
      keys_as_values=kind.keys_as_values,
      num_kv_heads=kind.num_kv_heads,
      head_dim=kind.head_dim,
      mlp_dim=kind.mlp_dim,
    )
