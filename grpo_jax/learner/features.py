"""Hidden states of completions that share their prompt."""

import dataclasses

import jax
import jax.numpy as jnp

from grpo_jax import model
from grpo_jax.types import Batch, Routing


def completion_features(
  params: model.Params, config: model.ModelConfig, batch: Batch, remat: bool = False
) -> tuple[jax.Array, Routing | None]:
  """The hidden states from which completion tokens are predicted.

  The prompt is computed once per group. This is the one place that shifts by a token: token 0 is
  predicted at the prompt's last token, token t at completion token t - 1.

  Args:
    params: All parameters of the model.
    config: The model.
    batch: Prompts, completions and the loss mask.
    remat: Recompute each layer in the backward pass.

  Returns:
    Hidden states [P, G, T, D], and the routing of each group, [P, ...], or None for a model without
    experts. The routing counts a group's prompt once, if any of the group's tokens is in the loss,
    and the completion tokens of the loss except the last, which predict nothing.
  """
  P, G, T = batch.completions_PGT.shape
  S = batch.prompts_PS.shape[1]
  config = dataclasses.replace(config, length=S + T)
  prompt_PSD, cache, prompt_routing = _prompt_features(params, config, batch, remat)
  last_token_P = batch.prompt_lengths_P - 1
  last_PD = jnp.take_along_axis(prompt_PSD, last_token_P[:, None, None], axis=1)[:, 0]
  first_PG1D = jnp.broadcast_to(last_PD[:, None, None], (P, G, 1, last_PD.shape[-1]))
  if T == 1:
    return first_PG1D, prompt_routing

  prefix = model.share(cache, batch.prompt_lengths_P)
  row_cache = model.empty(config, prefix, G, capacity=0)
  positions_PGT = jnp.broadcast_to(
    batch.prompt_lengths_P[:, None, None] + jnp.arange(T - 1), (P, G, T - 1)
  )
  rest_BTD, _, row_routing = model.routed_features(
    params,
    config,
    batch.completions_PGT[..., :-1].reshape(P * G, T - 1),
    positions_PGT.reshape(P * G, T - 1),
    batch.mask_PGT[..., :-1].reshape(P * G, T - 1),
    row_cache,
    remat,
  )
  hidden_PGTD = jnp.concatenate([first_PG1D, rest_BTD.reshape(P, G, T - 1, -1)], axis=2)

  def add_rows(prompt: jax.Array, rows: jax.Array) -> jax.Array:
    return prompt + rows.reshape(P, G, *rows.shape[1:]).sum(1)

  return hidden_PGTD, jax.tree.map(add_rows, prompt_routing, row_routing)


def _prompt_features(
  params: model.Params, config: model.ModelConfig, batch: Batch, remat: bool
) -> tuple[jax.Array, model.Cache, Routing | None]:
  S = batch.prompts_PS.shape[1]
  positions_PS = jnp.broadcast_to(jnp.arange(S), batch.prompts_PS.shape)
  learns_P = (batch.mask_PGT != 0).any((1, 2))
  counted_PS = (positions_PS < batch.prompt_lengths_P[:, None]) & learns_P[:, None]
  return model.routed_features(
    params, config, batch.prompts_PS, positions_PS, counted_PS, remat=remat
  )
