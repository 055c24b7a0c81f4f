"""The MLP that every token goes through."""

from flax import linen as nn
import jax

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.kernels import Target
from grpo_jax.model.layers import ACTIVATIONS, Dense, merged
from grpo_jax.model.mlps.router import Routes

# Path in a layer -> the axis of the mesh that splits each dimension (see parallel/sharding.py).
_PATH = r"(mlp|experts/shared)/"
RULES = (
  (_PATH + r"down/bias", (None,)),
  (_PATH + r"(gate|up)/bias", ("tensor",)),
  (_PATH + r"(gate|up)/kernel", ("fsdp", "tensor")),
  (_PATH + r"down/kernel", ("tensor", "fsdp")),
  (_PATH + r"(gate|up)/lora_a", ("fsdp", None)),
  (_PATH + r"(gate|up)/lora_b", (None, "tensor")),
  (_PATH + r"down/lora_a", ("tensor", None)),
  (_PATH + r"down/lora_b", (None, "fsdp")),
)
# Path of a kernel in a layer -> the projection, which can have an adapter.
TARGETS = {
  f"{path}/{name}": Target(modules)
  for path in ("mlp", "experts/shared")
  for name, modules in (
    ("gate", ("gate_proj", "gate_up_proj")),
    ("up", ("up_proj", "gate_up_proj")),
    ("down", ("down_proj",)),
  )
}


class MLP(nn.Module):
  """The gated MLP: down(activation(gate x) * up x) (Shazeer 2002.05202).

  It has `width` hidden units. 0 stands for `config.mlp_dim`.
  """

  config: ModelConfig
  width: int = 0

  @nn.compact
  def __call__(
    self,
    x_BTD: jax.Array,
    routes: Routes | None = None,
    residual_BTD: jax.Array | None = None,
  ) -> tuple[jax.Array, None]:
    """Returns the output [B, T, D], and None. Without a router, the other arguments are ignored."""
    del routes, residual_BTD
    c, width = self.config, self.width or self.config.mlp_dim

    def project(mlp: nn.Module, name: str, features: int, x: jax.Array) -> jax.Array:
      return Dense(c, (features,), use_bias=c.mlp_bias, name=name, parent=mlp)(x)

    # The backward pass recomputes the hidden units. Saving them and the derivative of the
    # activation would take longer on a CPU, and more memory everywhere.
    @nn.remat
    def down(mlp: nn.Module, gate: jax.Array, up: jax.Array) -> jax.Array:
      return project(mlp, "down", c.embed_dim, ACTIVATIONS[c.activation](gate, up))

    # Reshaped once, so that the backward pass keeps one array for both projections.
    rows = merged(c, x_BTD)
    gate, up = project(self, "gate", width, rows), project(self, "up", width, rows)
    return down(self, gate, up).reshape(x_BTD.shape), None
