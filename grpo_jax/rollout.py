"""Prompts -> completions -> rewards: the sampler wired to the model, and the host's half of a step."""
import dataclasses
from typing import Any, Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import model
from grpo_jax import rewards as rewards_lib
from grpo_jax.config import Reward, Sampling
from grpo_jax.data.loader import PromptBatch
from grpo_jax.sampler.decode import capacities, decode
from grpo_jax.types import Completions

Sampler = Callable[..., Completions]


def make_sampler(config: model.ModelConfig, sampling: Sampling, group_size: int) -> Sampler:
  """-> sample(params, prompts_PS, prompt_lengths_P, key, first_prompt=0), pure; jitted by the caller.

  Completion [p, g] is drawn with fold_in(key, (first_prompt + p) * G + g).

  Prompts are computed once per group. A completion ends with a stop id of the model or of `sampling`.
  """
  sampling = dataclasses.replace(sampling, stop_ids=tuple(dict.fromkeys((*config.stop_ids, *sampling.stop_ids))))
  decoder = dataclasses.replace(config, dtype=sampling.dtype or config.dtype)

  def sample(params, prompts_PS, prompt_lengths_P, key, first_prompt=0) -> Completions:
    positions_PS = jnp.broadcast_to(jnp.arange(prompts_PS.shape[1]), prompts_PS.shape)
    config = dataclasses.replace(decoder, max_positions=prompts_PS.shape[1] + sampling.max_tokens)
    hidden_PSD, cache = model.features(params, config, prompts_PS, positions_PS)
    last_PD = jnp.take_along_axis(hidden_PSD, (prompt_lengths_P - 1)[:, None, None], axis=1)[:, 0]
    prefix = model.share(cache, prompt_lengths_P)
    lengths_B = jnp.repeat(prompt_lengths_P, group_size)

    def step(cache, token_B, time):
      logits_B1V, cache = model.forward(params, config, token_B[:, None], (lengths_B + time)[:, None], cache)
      return logits_B1V[:, 0], cache

    return decode(step, model.grow, model.empty(config, prefix, group_size, capacities(sampling.max_tokens)[0]),
                  model.unembed(params, config, last_PD), key, first_prompt * group_size, group_size=group_size, sampling=sampling)

  return sample


@dataclasses.dataclass(frozen=True)
class Scored:
  """A rollout on the host."""
  texts: list[list[str]]  # [P][G] completions, without the token that ended them where it is a special one
  rewards_PG: np.ndarray  # float32, NaN = no function scored it
  scores: dict[str, np.ndarray]  # reward function -> [P, G], NaN = None


def score(out: Completions, prompts: PromptBatch, decode_text: Callable[[Sequence[int]], str],
          functions: Sequence[rewards_lib.Reward], config: Reward) -> Scored:
  """Decodes completions (numpy arrays) and calls the reward functions once, on all of them."""
  P, G, _ = out.tokens_PGT.shape
  texts = [[decode_text(tokens[:n].tolist()) for tokens, n in zip(*group)]
           for group in zip(out.tokens_PGT, out.lengths_PG)]
  columns = {name: [value for value in values for _ in range(G)] for name, values in prompts.columns.items()}
  flat = [text for group in texts for text in group]
  rewards_N, scores = rewards_lib.score(functions, config.weights, flat, columns)
  return Scored(texts, rewards_N.reshape(P, G), {name: values.reshape(P, G) for name, values in scores.items()})


def unscored(out: Completions, prompts: PromptBatch, decode_text, functions: Sequence[rewards_lib.Reward],
             config: Reward) -> Scored:
  """What stands for `score` where another process does the scoring."""
  P, G, _ = out.tokens_PGT.shape
  nothing = np.full((P, G), np.nan, np.float32)
  return Scored([[""] * G] * P, nothing, {str(i): nothing for i in range(len(functions))})


def metrics(out: Completions, scored: Scored) -> dict[str, float]:
  """What a rollout tells, under TRL's names. Zero std: a group whose scored rewards do not differ, or that has none.

  reward_std is of all completions, not within groups, as in TRL.
  """
  rewards_PG = scored.rewards_PG
  some_P = ~np.isnan(rewards_PG).all(1)
  spread_P = np.array([np.nanmax(r) > np.nanmin(r) if some else False for r, some in zip(rewards_PG, some_P)])
  mean = lambda x: float(np.nanmean(x)) if np.isfinite(x).any() else float("nan")
  values = {
      "reward": mean(rewards_PG),
      "reward_std": float(np.nanstd(rewards_PG, ddof=1)) if np.isfinite(rewards_PG).sum() > 1 else float("nan"),
      "frac_reward_zero_std": float(1 - spread_P.mean()),
      "completions/mean_length": float(out.lengths_PG.mean()),
      "completions/min_length": float(out.lengths_PG.min()),
      "completions/max_length": float(out.lengths_PG.max()),
      "completions/clipped_ratio": float((out.stopped_by_PG < 0).mean()),
      # How much likelier a token was drawn than the policy has it: 0 without top-k, top-p and min-p.
      "sampler/filter_gap_mean": float((out.sampling_logprobs_PGT - out.logprobs_PGT).sum() / out.lengths_PG.sum()),
  }
  return values | {f"rewards/{name}/mean": mean(x) for name, x in scored.scores.items()}


def rows(out: Completions, scored: Scored, prompts: PromptBatch) -> list[dict[str, Any]]:
  """One JSON-ready object per completion, for completions/ and the terminal."""
  number = lambda x: None if np.isnan(x) else float(x)
  return [
      {"prompt": prompts.texts[p], "completion": text, "reward": number(scored.rewards_PG[p, g]),
       **{f"rewards/{name}": number(x[p, g]) for name, x in scored.scores.items()},
       "length": int(out.lengths_PG[p, g]), "stopped_by": int(out.stopped_by_PG[p, g])}
      for p, group in enumerate(scored.texts) for g, text in enumerate(group)]
