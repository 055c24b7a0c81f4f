"""The shape of a decoder, as data: a model family is a row of these fields, never a copy of the code."""
import dataclasses
import math

import jax


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """V vocab_size · D embed_dim · L num_layers · H num_heads · K num_kv_heads · E head_dim · F mlp_dim."""
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
  qkv_bias: bool = True
  max_positions: int = 32768  # prompt + completion may not be longer
  stop_ids: tuple[int, ...] = ()  # token ids that end a text (eos_token_id of the checkpoint)
  dtype: str = "float32"  # of the computation; parameters are float32
  # On the mesh, None = where XLA likes:
  rows: jax.sharding.NamedSharding | None = None  # where the rows of activations lie
  table: jax.sharding.NamedSharding | None = None  # where the embedding lies while tokens are looked up

  @property
  def row_shards(self) -> int:
    """Over how many devices the rows of activations are split."""
    return 1 if self.rows is None else math.prod(self.rows.mesh.shape[axis] for axis in self.rows.spec[0])

  @property
  def queries_per_kv(self) -> int:
    """R = H / K."""
    return self.num_heads // self.num_kv_heads
