"""Attention over groups."""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.layers import Attend, attend


class Groups(NamedTuple):
  """Prompts and their completions, one after another: N = S + G * T slots for each group.

  Attributes:
    lengths_P: int32, how many tokens each prompt has. It is right-padded to S.
    prompt_slots: S.
    completions: G. 0 where there are only prompts.
    slots: T, the slots of a completion.
  """

  lengths_P: jax.Array
  prompt_slots: int
  completions: int = 0
  slots: int = 0

  @property
  def positions(self) -> jax.Array:
    """int32 [P, N], the position of each token in its text."""
    P = len(self.lengths_P)
    prompt_PS = jnp.broadcast_to(jnp.arange(self.prompt_slots), (P, self.prompt_slots))
    one_PT = self.lengths_P[:, None] + jnp.arange(self.slots)
    return jnp.concatenate([prompt_PS, jnp.tile(one_PT, (1, self.completions))], 1)


def in_groups(config: ModelConfig, groups: Groups, keep: bool = False) -> Callable[[int], Attend]:
  """window -> attention of a group's tokens. It returns keys and values, too, if `keep` is set."""

  def attend_of(window: int) -> Attend:
    def attend_in_groups(q, k, v, memory):
      del memory
      out = dense(q, k, v, groups, window, config.attention_cap)
      return out, ((k, v) if keep else None)

    return attend_in_groups

  return attend_of


def dense(q, k, v, groups, window, cap):
  P, N, H, E = q.shape
  K = k.shape[2]
  S, G, T = groups.prompt_slots, groups.completions, groups.slots
  q = q.reshape(P, N, K, H // K, E)
  at = jnp.arange(S)
  back = at[:, None] - at
  mask = (back >= 0) & (back < window) if window else back >= 0
  qs, ks, vs = (x[:, :S] for x in (q, k, v))
  ks, vs = (x.transpose(0, 2, 1, 3)[:, :, None] for x in (ks, vs))
  out = attend(qs.transpose(0, 2, 3, 1, 4)[:, :, None], (ks, vs), mask, None, None, cap)
  out = out[:, :, 0].transpose(0, 3, 1, 2, 4).reshape(P, S, H, E)
  if not G * T:
    return out
  qc = q[:, S:].reshape(P, G, T, K, H // K, E).transpose(0, 3, 1, 4, 2, 5)
  kc, vc = (x[:, S:].reshape(P, G, T, K, E).transpose(0, 3, 1, 2, 4) for x in (k, v))
  at = jnp.arange(T)
  back = at[:, None] - at
  mask = (back >= 0) & (back < window) if window else back >= 0
  lengths = groups.lengths_P[:, None, None]
  pmask = jnp.arange(S) < lengths
  if window:
    pmask &= lengths + at[:, None] - jnp.arange(S) < window
  own = attend(qc, (kc, vc), mask, (ks[:, :, 0], vs[:, :, 0]), pmask[:, None, None, None], cap)
  own = own.transpose(0, 2, 4, 1, 3, 5).reshape(P, G * T, H, E)
  return jnp.concatenate([out, own], 1)
