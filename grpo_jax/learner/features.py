"""Hidden states of completions that share their prompt."""

import dataclasses

import jax
import jax.numpy as jnp

from grpo_jax import model
from grpo_jax.types import Batch, Routing


def completion_features(
  params: model.Params, config: model.ModelConfig, batch: Batch, remat: str = ""
) -> tuple[jax.Array, Routing | None]:
  """The hidden states from which completion tokens are predicted.

  The prompt is computed once per group. This is the one place that shifts by a token: token 0 is
  predicted at the prompt's last token, token t at completion token t - 1.

  Args:
    params: All parameters of the model.
    config: The model.
    batch: Prompts, completions and the loss mask.
    remat: Which activations of a layer are saved for the backward pass: a name in
      jax.checkpoint_policies, or "" for all.

  Returns:
    Hidden states [P, G, T, D], and the routing of each group, [P, ...], or None for a model without
    experts. The routing counts a group's prompt once, if any of the group's tokens is in the loss,
    and the completion tokens of the loss except the last, which predict nothing.
  """
  P, G, T = batch.completions_PGT.shape
  S = batch.prompts_PS.shape[1]
  config = dataclasses.replace(config, length=S + T)
  groups = model.Groups(batch.prompt_lengths_P, S, G, T - 1)

  def join(prompt_PS: jax.Array, completion_PGT: jax.Array) -> jax.Array:
    rest_PN = completion_PGT[..., :-1].reshape(P, G * (T - 1))
    return jnp.concatenate([prompt_PS, rest_PN], 1)

  learns_P = (batch.mask_PGT != 0).any((1, 2))
  is_prompt_PS = jnp.arange(S) < batch.prompt_lengths_P[:, None]
  counted_PN = join(is_prompt_PS & learns_P[:, None], batch.mask_PGT != 0)
  tokens_PN = join(batch.prompts_PS, batch.completions_PGT)
  hidden_PND, routing = model.group_features(params, config, tokens_PN, groups, counted_PN, remat)
  last_token_P11 = (batch.prompt_lengths_P - 1)[:, None, None]
  last_P1D = jnp.take_along_axis(hidden_PND[:, :S], last_token_P11, axis=1)
  first_PG1D = jnp.broadcast_to(last_P1D[:, None], (P, G, 1, hidden_PND.shape[-1]))
  rest_PGTD = hidden_PND[:, S:].reshape(P, G, T - 1, -1)
  return jnp.concatenate([first_PG1D, rest_PGTD], axis=2), routing
