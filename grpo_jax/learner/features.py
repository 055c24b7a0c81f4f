"""Hidden states of completions that share their prompt."""

import dataclasses

import jax
import jax.numpy as jnp

from grpo_jax import model
from grpo_jax.learner.packed import lengths, row_slots
from grpo_jax.types import Batch, Routing


def completion_features(
  params: model.Params,
  config: model.ModelConfig,
  batch: Batch,
  remat: str = "",
  replays: bool = True,
) -> tuple[jax.Array, Routing | None]:
  """The hidden states from which completion tokens are predicted.

  The prompt is computed once per group. Only this function shifts by a token: token 0 is predicted
  at the prompt's last token, and token t at completion token t - 1.

  Args:
    params: All parameters of the model.
    config: The model.
    batch: Prompts with images, completions and the loss mask.
    remat: Which activations of a layer are saved for the backward pass (see `apply_layers`).
    replays: Tokens go through the sampler's experts, if the batch has these. False: the routers
      choose, and the statistics compare both.

  Returns:
    The hidden states [P, W, D] that predict the targets, and the routing of each group [P, ...], or
    None for a model without experts. Targets are in rows, W = G * T, or in the layout that
    `targets_of` returns. The routing counts a group's prompt once, if any of the group's tokens is
    in the loss, and a completion's loss tokens except its last token, which predicts nothing.
  """
  P, G, T = batch.completions_PGT.shape
  length = config.text_tokens or batch.prompts_PS.shape[1] + max(T, config.completion_tokens)
  batch = pad_to_split_evenly(batch, config)
  S = batch.prompts_PS.shape[1]
  # Scalings of rope depend on the longest text, which is the sampler's even if padding was added or
  # cut off. But each slot of a prompt needs an angle, and padded prompts may have more slots than
  # the longest text has tokens.
  config = dataclasses.replace(config, length=max(length, S))
  in_row, inputs, targets = row_slots(T, config.platform), None, None
  if batch.slots:
    inputs, targets = input_packing(batch, in_row), target_packing(batch)
  # With T = 1, all targets are predicted at the prompt's last token, and no completion is computed.
  computed = G if T > 1 else 0
  groups = model.Groups(batch.prompt_lengths_P, S, computed, in_row, inputs)

  tokens_PN = _prompts_then_completions(batch.prompts_PS, batch.completions_PGT, in_row, inputs)
  routes, visual = _routes(batch, in_row, inputs, replays), batch.visual
  if batch.images is not None:
    visual = model.encode(params, config, batch.images, remat)
  hidden_PND, routing = model.group_features(
    params, config, tokens_PN, groups, routes, remat, visual=visual
  )
  if config.context > 1:  # devices share a group's tokens, and hidden states stay where they are
    return _first_in_place(hidden_PND, batch.prompt_lengths_P, G), routing
  last_token_P11 = (batch.prompt_lengths_P - 1)[:, None, None]
  last_P1D = jnp.take_along_axis(hidden_PND[:, :S], last_token_P11, axis=1)
  if targets is not None:
    return _shifted(hidden_PND[:, S:], last_P1D, inputs, targets, (in_row, T)), routing
  D = hidden_PND.shape[-1]
  first_PG1D = jnp.broadcast_to(last_P1D[:, None], (P, G, 1, D))
  # The last token of a row predicts nothing.
  rest = hidden_PND[:, S:].reshape(P, G, in_row, D)[:, :, : T - 1]
  return jnp.concatenate([first_PG1D, rest], axis=2).reshape(P, G * T, D), routing


def _prompts_then_completions(
  of_prompts: jax.Array, of_completions: jax.Array, in_row: int, inputs: model.Packing | None
) -> jax.Array:
  """Joins arrays of tokens along the axis N of the tokens that the layers compute.

  Args:
    of_prompts: [P, S, ...].
    of_completions: [P, G, T, ...].
    in_row: How many slots of a completion the layers compute. Tokens after these are left out.
    inputs: The packing of the completions. None means G rows.

  Returns:
    [P, N, ...]: the S slots of the prompt, then the slots of its completions.
  """
  P, G, _, *rest = of_completions.shape
  in_rows = of_completions[:, :, :in_row].reshape(P, G * in_row, *rest)
  if inputs is not None:
    in_rows = model.pack(in_rows, inputs)
  return jnp.concatenate([of_prompts, in_rows], 1)


def _routes(batch: Batch, in_row: int, inputs: model.Packing | None, replays: bool) -> model.Routes:
  """The instructions to routers: which tokens to count, and the experts that the sampler used.

  `replays` is as in `completion_features`, the other arguments as in `_prompts_then_completions`.
  """
  (_, S), T = batch.prompts_PS.shape, batch.completions_PGT.shape[2]
  learns_P = (batch.mask_PGT != 0).any((1, 2))
  is_prompt_PS = jnp.arange(S) < batch.prompt_lengths_P[:, None]
  # The last token of a row predicts nothing that is in the loss.
  predicts_PGT = jnp.arange(T) < lengths(batch.mask_PGT)[..., None] - 1
  counts_PGT = (batch.mask_PGT != 0) & predicts_PGT
  counted_PN = _prompts_then_completions(
    is_prompt_PS & learns_P[:, None], counts_PGT, in_row, inputs
  )
  if inputs is not None:
    # Free slots of the packing hold copies of other tokens, which are counted in their own slots.
    counted_PN = counted_PN.at[:, S:].set(counted_PN[:, S:] & (inputs.token_PN >= 0))
  if batch.experts_PGTY is None:
    return model.Routes(counted_PN)
  experts_PNY = _prompts_then_completions(
    batch.prompt_experts_PSY, batch.experts_PGTY, in_row, inputs
  )
  # Statistics compare only the experts of completions, though the sampler keeps a prompt's, too.
  compared_PN = counted_PN.at[:, :S].set(False)
  return model.Routes(counted_PN, experts_PNY, compared_PN, replays)


def input_packing(batch: Batch, in_row: int) -> model.Packing:
  """The packing of the completion tokens that the layers compute, from rows of `in_row` slots."""
  counts_PG = jnp.maximum(lengths(batch.mask_PGT) - 1, 0)
  return model.make_packing(counts_PG, in_row, batch.slots)


def targets_of(batch: Batch, config: model.ModelConfig) -> model.Packing | None:
  """The packing of the targets, the tokens to predict. None means rows of T."""
  if config.context > 1:
    in_row = row_slots(batch.completions_PGT.shape[2], config.platform)
    return _targets_in_place(pad_to_split_evenly(batch, config), in_row)
  return target_packing(batch) if batch.slots else None


def target_packing(batch: Batch) -> model.Packing:
  """The packing of the targets, the tokens to predict, from rows of T."""
  _, G, T = batch.completions_PGT.shape
  # A group has at most G more targets than inputs: the first token of each completion.
  return model.make_packing(lengths(batch.mask_PGT), T, batch.slots + G)


def _shifted(
  hidden_PND: jax.Array,
  last_P1D: jax.Array,
  inputs: model.Packing,
  targets: model.Packing,
  sizes: tuple[int, int],
) -> jax.Array:
  """The hidden state that predicts each of the W targets, [P, W, D].

  Target t > 0 of a row is predicted by input t - 1 of the row, and target 0 by the prompt.

  Args:
    hidden_PND: The hidden states of the N packed inputs.
    last_P1D: The hidden states of the prompts' last tokens.
    inputs: The packing of the inputs: each row's tokens except its last.
    targets: The packing of the targets.
    sizes: The slots of a row of inputs, and those of a row of targets.
  """
  of_inputs, of_targets = sizes
  # Free slots (-1) stand for token 0 here, because nobody reads their results.
  row_PW, time_PW = jnp.divmod(jnp.maximum(targets.token_PN, 0), of_targets)
  # The input before each target. For target 0, the last line takes the prompt's state instead.
  before_PW = row_PW * of_inputs + jnp.maximum(time_PW - 1, 0)
  source_PW = jnp.take_along_axis(inputs.slot_PC, before_PW, 1)
  # The inverse of `source_PW`, for the gradient: the target that each input predicts, if any. As a
  # row's last token is no input, time_PN + 1 stays within the row.
  row_PN, time_PN = jnp.divmod(jnp.maximum(inputs.token_PN, 0), of_inputs)
  target_PN = jnp.take_along_axis(targets.slot_PC, row_PN * of_targets + time_PN + 1, 1)
  target_PN = jnp.where(inputs.token_PN >= 0, target_PN, -1)
  rest_PWD = model.move(hidden_PND, source_PW, target_PN)
  return jnp.where((time_PW == 0)[..., None], last_P1D, rest_PWD)


def pad_to_split_evenly(batch: Batch, config: model.ModelConfig) -> Batch:
  """Pads the prompts, so that devices which share the tokens of a group have equally many each.

  The prompts get at least G slots, because the first tokens of completions are predicted in the
  first G slots (`_first_in_place`). Without a split of tokens, the batch stays as it is.
  """
  if config.context == 1:
    return batch
  _, G, T = batch.completions_PGT.shape
  S = batch.prompts_PS.shape[1]
  # Completions that are not packed have G rows.
  completion_slots = batch.slots or G * row_slots(T, config.platform)
  pieces = 2 * config.context  # in a ring, each device has an early and a late piece of a group
  prompt_slots = max(S, G)
  missing = -(prompt_slots + completion_slots) % pieces  # to the next multiple of `pieces`
  prompt_slots += missing

  def padded(x: jax.Array, value: int) -> jax.Array:
    after = [(0, 0), (0, prompt_slots - S)] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, after, constant_values=value)

  experts = batch.prompt_experts_PSY
  return batch.replace(
    prompts_PS=padded(batch.prompts_PS, 0),
    prompt_experts_PSY=None if experts is None else padded(experts, -1),
  )


def _first_in_place(hidden_PND: jax.Array, prompt_lengths_P: jax.Array, G: int) -> jax.Array:
  """The hidden states [P, N, D], but in the first G slots that of the prompt's last token.

  There, the first token of each completion is predicted. Every other token is predicted in the slot
  of the token before it, so that no other hidden state moves between devices.
  """
  slots_N1 = jnp.arange(hidden_PND.shape[1])[:, None]
  is_last_PN1 = slots_N1 == (prompt_lengths_P - 1)[:, None, None]
  last_P1D = jnp.where(is_last_PN1, hidden_PND, 0).sum(1, keepdims=True)
  return jnp.where(slots_N1 < G, last_P1D, hidden_PND)


def _targets_in_place(batch: Batch, in_row: int) -> model.Packing:
  """The packing of the targets in the slots of `_first_in_place`."""
  P, G, T = batch.completions_PGT.shape
  S = batch.prompts_PS.shape[1]
  # `before`: for each input token its slot, in which the next token is predicted. `token_PN`: for
  # each slot its input token. In rows, both are the same numbers.
  before = jnp.broadcast_to(jnp.arange(G * in_row), (P, G * in_row))
  token_PN = before
  if batch.slots:
    before, token_PN = input_packing(batch, in_row)
  first_PG1 = jnp.broadcast_to(jnp.arange(G)[:, None], (P, G, 1))
  rest = S + before.reshape(P, G, in_row)[:, :, : T - 1]
  slot_PC = jnp.concatenate([first_PG1, rest], 2).reshape(P, G * T)
  row_PN, time_PN = jnp.divmod(token_PN, max(1, in_row))  # with T = 1, rows have no inputs
  # The target of each slot: the token after its input, unless that is the last of its row.
  is_target_PN = (token_PN >= 0) & (time_PN + 1 < T)
  after_PN = jnp.where(is_target_PN, row_PN * T + time_PN + 1, -1)
  # Slot g < G of the prompt predicts the first token of completion g.
  of_prompt_S = jnp.where(jnp.arange(S) < G, jnp.arange(S) * T, -1)
  of_prompt_PS = jnp.broadcast_to(of_prompt_S, (P, S))
  return model.Packing(slot_PC, jnp.concatenate([of_prompt_PS, after_PN], 1))
