"""One layer of the decoder."""

from typing import Any

from flax import linen as nn
import jax

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.experts import Experts
from grpo_jax.model.layers import MLP, Attend, Attention
from grpo_jax.model.rope import CosSin
from grpo_jax.types import Routing


class Block(nn.Module):
  """Attention, then an MLP or experts, each added to the residual stream.

  Their inputs are normalised, and with `config.post_norms` their outputs too.
  """

  config: ModelConfig
  sparse: bool
  attend: Attend

  @nn.compact
  def __call__(
    self,
    x_BTD: jax.Array,
    counted_BT: jax.Array | None,
    rope: CosSin,
    memory: Any,
  ) -> tuple[jax.Array, Any, Routing | None]:
    """Applies the layer.

    Args:
      x_BTD: The residual stream.
      counted_BT: The router's statistics count a token where this is not 0. None skips them.
      rope: The rotary angles of the tokens.
      memory: Passed on to `attend`.

    Returns:
      The residual stream, what `attend` returns beside its output, and the router's statistics or
      None.
    """
    c = self.config

    def norm(name: str, x: jax.Array) -> jax.Array:
      return nn.RMSNorm(epsilon=c.norm_eps, dtype=c.dtype, name=name)(x)

    def post_norm(name: str, x: jax.Array) -> jax.Array:
      return norm(name, x) if c.post_norms else x

    attention = Attention(c, self.attend, name="attention")
    attended_BTD, kept = attention(norm("attention_norm", x_BTD), rope, memory)
    x_BTD = x_BTD + post_norm("attention_post_norm", attended_BTD)
    normed_BTD = norm("mlp_norm", x_BTD)
    if self.sparse:
      out_BTD, routing = Experts(c, name="experts")(normed_BTD, counted_BT)
    else:
      out_BTD, routing = MLP(c, name="mlp")(normed_BTD), None
    return x_BTD + post_norm("mlp_post_norm", out_BTD), kept, routing
