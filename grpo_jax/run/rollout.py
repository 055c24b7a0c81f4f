"""Prompts -> completions -> rewards: the sampler wired to the model, and the host's half of a step."""

import bisect
import dataclasses
import os
from typing import Any, Callable, Sequence

import jax.numpy as jnp
import numpy as np

from grpo_jax import model
from grpo_jax import rewards as rewards_lib
from grpo_jax.config import Sampling
from grpo_jax.data.loader import PromptBatch
from grpo_jax.rewards.overlong import overlong
from grpo_jax.sampler.decode import capacities, decode
from grpo_jax.types import Completions

Sampler = Callable[..., Completions]


def make_sampler(config: model.ModelConfig, sampling: Sampling, group_size: int) -> Sampler:
  """-> sample(params, prompts_PS, prompt_lengths_P, key, first_prompt=0), pure; jitted by the caller.

  Completion [p, g] is drawn with fold_in(key, (first_prompt + p) * G + g).

  Prompts are computed once per group. A completion ends with a stop id of the model or of `sampling`.
  """
  sampling = dataclasses.replace(
    sampling, stop_ids=tuple(dict.fromkeys((*config.stop_ids, *sampling.stop_ids)))
  )
  decoder = dataclasses.replace(config, dtype=sampling.dtype or config.dtype)

  def sample(params, prompts_PS, prompt_lengths_P, key, first_prompt=0) -> Completions:
    positions_PS = jnp.broadcast_to(jnp.arange(prompts_PS.shape[1]), prompts_PS.shape)
    config = dataclasses.replace(decoder, length=prompts_PS.shape[1] + sampling.max_tokens)
    hidden_PSD, cache = model.features(params, config, prompts_PS, positions_PS)
    last_PD = jnp.take_along_axis(hidden_PSD, (prompt_lengths_P - 1)[:, None, None], axis=1)[:, 0]
    prefix = model.share(cache, prompt_lengths_P)
    lengths_B = jnp.repeat(prompt_lengths_P, group_size)

    def step(cache, token_B, time):
      logits_B1V, cache = model.forward(
        params, config, token_B[:, None], (lengths_B + time)[:, None], cache
      )
      return logits_B1V[:, 0], cache

    return decode(
      step,
      model.grow,
      model.empty(config, prefix, group_size, capacities(sampling.max_tokens)[0]),
      model.unembed(params, config, last_PD),
      key,
      first_prompt * group_size,
      group_size=group_size,
      sampling=sampling,
    )

  return sample


@dataclasses.dataclass(frozen=True)
class Scored:
  """A rollout on the host."""

  texts: list[
    list[str]
  ]  # [P][G] completions, without the token that ended them where it is a special one
  rewards_PG: np.ndarray  # float32, of the reward functions; NaN = none scored it
  scores: dict[
    str, np.ndarray
  ]  # reward function -> [P, G], NaN = None; and `overlong`, where that is on
  steps: dict[
    str, list[rewards_lib.Steps]
  ]  # the same names -> the steps of each of the P * G completions

  @property
  def differ_P(self) -> np.ndarray:
    """bool, groups in which two scored rewards differ."""
    some_P = ~np.isnan(self.rewards_PG).all(1)
    return np.array(
      [np.nanmax(r) > np.nanmin(r) if some else False for r, some in zip(self.rewards_PG, some_P)],
      bool,
    )


def score(
  out: Completions,
  prompts: PromptBatch,
  decode_text: Callable[[Sequence[int]], str],
  functions: Sequence[rewards_lib.Reward],
  weights: Sequence[float],
) -> Scored:
  """Decodes completions (numpy arrays) and calls the reward functions once, on all of them."""
  P, G, _ = out.tokens_PGT.shape
  texts = [
    [decode_text(tokens[:n].tolist()) for tokens, n in zip(*group)]
    for group in zip(out.tokens_PGT, out.lengths_PG)
  ]
  columns = {
    name: [value for value in values for _ in range(G)] for name, values in prompts.columns.items()
  }
  columns["completion_ids"] = [
    tokens[:n].tolist()
    for group in zip(out.tokens_PGT, out.lengths_PG)
    for tokens, n in zip(*group)
  ]
  flat = [text for group in texts for text in group]
  rewards_N, scores, steps = rewards_lib.score(functions, weights, flat, columns)
  return Scored(
    texts,
    rewards_N.reshape(P, G),
    {name: values.reshape(P, G) for name, values in scores.items()},
    steps,
  )


def with_overlong(scored: Scored, out: Completions, max_tokens: int, share: float) -> Scored:
  """With DAPO's penalty as one more score, of completions that reach into the last `share` of max_tokens."""
  penalty_PG = overlong(out.lengths_PG, max_tokens, round(share * max_tokens))
  penalty_PG = np.where(np.isnan(scored.rewards_PG), np.nan, penalty_PG)
  # A penalty of 0 is no step: it would count in the mean of all steps.
  steps = [
    [(max(1, len(text)), float(x))] if x < 0 else []
    for x, text in zip(penalty_PG.ravel(), (text for group in scored.texts for text in group))
  ]
  return dataclasses.replace(
    scored,
    scores=scored.scores | {"overlong": penalty_PG},
    steps=scored.steps | {"overlong": steps},
  )


def step_rewards(
  out: Completions,
  scored: Scored,
  weights: Sequence[float],
  decode_text: Callable[[Sequence[int]], str],
) -> tuple[np.ndarray, np.ndarray]:
  """-> (rewards, ends) float32 [P, G, T]: of each step, at the token with its last character; 1 at such tokens.

  Steps of several functions that end at one token are one, of the weighted sum. What ends with the text ends with the
  completion's last token.
  """
  P, G, T = out.tokens_PGT.shape
  rewards_BT, ends_BT = np.zeros((P * G, T), np.float32), np.zeros((P * G, T), np.float32)
  texts = [text for group in scored.texts for text in group]
  for weight, of_rows in zip(weights, scored.steps.values(), strict=True):
    for b, steps in enumerate(of_rows):
      tokens, n = out.tokens_PGT.reshape(P * G, T)[b], int(out.lengths_PG.ravel()[b])
      # Not the length of the decoded text: of a character cut between its bytes, each may be decoded to one of its own.
      written = lambda count: len(
        os.path.commonprefix([texts[b], decode_text(tokens[:count].tolist())])
      )
      for end, reward in steps:
        t = n - 1 if end >= len(texts[b]) else bisect.bisect_left(range(1, n), end, key=written)
        rewards_BT[b, t] += weight * reward
        ends_BT[b, t] = 1
  return rewards_BT.reshape(P, G, T), ends_BT.reshape(P, G, T)


def metrics(out: Completions, scored: Scored) -> dict[str, float]:
  """What a rollout tells, under TRL's names. Zero std: a group whose scored rewards do not differ, or that has none.

  reward_std is of all completions, not within groups, as in TRL.
  """
  rewards_PG = scored.rewards_PG
  mean = lambda x: float(np.nanmean(x)) if np.isfinite(x).any() else float("nan")
  values = {
    "reward": mean(rewards_PG),
    "reward_std": float(np.nanstd(rewards_PG, ddof=1))
    if np.isfinite(rewards_PG).sum() > 1
    else float("nan"),
    "frac_reward_zero_std": float(1 - scored.differ_P.mean()),
    "completions/mean_length": float(out.lengths_PG.mean()),
    "completions/min_length": float(out.lengths_PG.min()),
    "completions/max_length": float(out.lengths_PG.max()),
    "completions/clipped_ratio": float((out.stopped_by_PG < 0).mean()),
    # How much likelier a token was drawn than the policy has it: 0 without top-k, top-p and min-p.
    "sampler/filter_gap_mean": float(
      (out.sampling_logprobs_PGT - out.logprobs_PGT).sum() / out.lengths_PG.sum()
    ),
  }
  values |= {f"rewards/{name}/mean": mean(x) for name, x in scored.scores.items()}
  return values | {
    f"rewards/{name}/unscored": int(np.isnan(x).sum()) for name, x in scored.scores.items()
  }


def rows(out: Completions, scored: Scored, prompts: PromptBatch) -> list[dict[str, Any]]:
  """One JSON-ready object per completion, for completions/ and the terminal."""
  number = lambda x: None if np.isnan(x) else float(x)
  return [
    {
      "prompt": prompts.texts[p],
      "completion": text,
      "reward": number(scored.rewards_PG[p, g]),
      **{f"rewards/{name}": number(x[p, g]) for name, x in scored.scores.items()},
      "length": int(out.lengths_PG[p, g]),
      "stopped_by": int(out.stopped_by_PG[p, g]),
    }
    for p, group in enumerate(scored.texts)
    for g, text in enumerate(group)
  ]
