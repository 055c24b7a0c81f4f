"""The shape of a decoder, as data: a model family is a row of these fields, never a copy of the code."""

import dataclasses
import math

import jax

from grpo_jax.model.rope import RopeScaling

PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")  # what may have an adapter


@dataclasses.dataclass(frozen=True)
class Lora:
  """Adapters (model/lora.py)."""

  rank: int
  alpha: float
  rslora: bool  # scale by alpha / sqrt(rank) (Kalajdzievski 2312.03732), which higher ranks need, instead of alpha / rank
  targets: tuple[str, ...]  # of PROJECTIONS

  @property
  def scale(self) -> float:
    return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """V vocab_size · D embed_dim · L num_layers · H num_heads · K num_kv_heads · E head_dim · F mlp_dim ·
  X num_experts · A experts_per_token · M expert_dim."""

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
  max_positions: int = 32768  # prompt + completion may not be longer
  # What families differ in:
  family: str = "qwen2"  # a model_type of Hugging Face: under which names the weights are saved
  qkv_bias: bool = True
  qk_norm: bool = False  # of each head's queries and keys, before they are rotated
  activation: str = "silu"  # a name of layers.ACTIVATIONS
  post_norms: bool = False  # of what attention and MLP add to the stream
  scale_embeddings: bool = False  # by sqrt(D)
  query_scalar: float = 0.0  # queries are divided by its root; 0 = E
  attention_cap: float = 0.0  # scores are cap tanh(score / cap); 0 = as they are
  logit_cap: float = 0.0  # the same of the logits
  rope_scaling: RopeScaling | None = None
  windows: tuple[
    int, ...
  ] = ()  # of each layer: how many tokens back a token sees, itself included; 0 = all; () = all 0
  local_rope_theta: float = 0.0  # of layers with a window, and without scaling; 0 = as the others
  labels: int = 0  # numbers of a reward model's head: 1 = the score of a text, 2 = a step is wrong, is right; 0 = no such head
  num_experts: int = 0  # that take an MLP's place in the layers of sparse_layers
  experts_per_token: int = 0
  expert_dim: int = 0
  normalise_shares: bool = (
    False  # the shares of a token's experts sum to 1; else they are their probabilities
  )
  sparse_layers: tuple[int, ...] = ()
  stop_ids: tuple[int, ...] = ()  # token ids that end a text (eos_token_id of the checkpoint)
  dtype: str = "float32"  # of the computation; master weights are float32
  length: int = 0  # tokens of the longest text of this computation, where that is known; angles then come from a table
  lora: Lora | None = (
    None  # the policy's adapters, on top of frozen parameters; None = all parameters are trained
  )
  # On the mesh, None = where XLA likes:
  rows: jax.sharding.NamedSharding | None = None  # where the rows of activations lie
  table: jax.sharding.NamedSharding | None = (
    None  # where the embedding lies while tokens are looked up
  )
  experts: jax.sharding.NamedSharding | None = (
    None  # where [X, D, M] lies while tokens go through experts
  )

  @property
  def row_shards(self) -> int:
    """Over how many devices the rows of activations are split."""
    return (
      1
      if self.rows is None
      else math.prod(self.rows.mesh.shape[axis] for axis in self.rows.spec[0])
    )

  def window(self, layer: int) -> int:
    """Of a layer; 0 = none."""
    return self.windows[layer] if self.windows else 0

  @property
  def queries_per_kv(self) -> int:
    """R = H / K."""
    return self.num_heads // self.num_kv_heads
