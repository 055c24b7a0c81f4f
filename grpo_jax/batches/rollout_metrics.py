"""Computes the metrics of rollouts under TRL's names, and the rows of completions/."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo_jax.algo.metrics import disjoint
from grpo_jax.data.images.shown import shown
from grpo_jax.data.prompts import Prompt
from grpo_jax.rollouts.rollout import Rollouts
from grpo_jax.scoring.scores import groups_that_differ, host_scores
from grpo_jax.types import Completions, Rewards


def rollout_metrics(
  completions: Completions, rewards: Rewards, names: list[str]
) -> dict[str, float]:
  """Metrics of sampled completions. docs/from_trl.md compares them with TRL's of the same names.

  A length counts the tokens that the policy sampled, not those of an environment. `reward_std` is
  over all completions and not within groups, as in TRL. `frac_reward_zero_std` is the fraction of
  groups without two different rewards. `sampler/filter_gap_mean` is the mean of log q - log p over
  tokens, with the probabilities q with and p without the filters top-k, top-p and min-p. Without
  filters it is 0.

  Args:
    completions: The completions, as numpy arrays.
    rewards: The scores of the reward functions, without the penalty for length.
    names: The names of the functions.
  """
  rewards_PG = host_scores(rewards)
  scored = rewards_PG[~np.isnan(rewards_PG)]
  lengths_PG = completions.sampled_PGT.sum(-1)
  sampled_tokens = lengths_PG.sum()
  ended = completions.stopped_by_PG >= 0
  gap_PGT = completions.behavior_logprobs_PGT - completions.logprobs_PGT
  gap_PGT = np.where(completions.sampled_PGT, gap_PGT, 0)
  metrics = {
    "reward": float(scored.mean()) if scored.size else float("nan"),
    "reward_std": _spread(scored),
    "frac_reward_zero_std": float(1 - groups_that_differ(rewards).mean()),
    **_lengths(lengths_PG, ""),
    # 0 if all completions were cut off
    **_lengths(lengths_PG[ended] if ended.any() else np.zeros(1), "terminated_"),
    "completions/clipped_ratio": float((~ended).mean()),
    "completions/tokens": int(sampled_tokens),
    "sampler/filter_gap_mean": float(gap_PGT.sum() / max(1, sampled_tokens)),
  }
  return metrics | score_metrics(rewards, names)


def turn_metrics(turns_PG: np.ndarray) -> dict[str, float]:
  """Metrics of conversations. The metrics of tools have TRL's names.

  `tools/call_frequency` is the mean number of calls in a completion. `tools/failure_frequency` is
  the share of calls that failed. `environment/turns` is the mean number of turns, and
  `environment/errors`, `timeouts` and `crashes` count conversations that ended so.
  `harness/prompt_tokens` is the number of prompt tokens of all calls that harnesses made to the
  policy, and `harness/computed_tokens` counts only tokens that were not cached.
  `harness/lost_tokens` counts the policy's tokens beyond sampling.max_tokens. `harness/NAME` is the
  mean of a metric that the harness returned.

  Args:
    turns_PG: object array of `Conversation`.
  """
  talks = list(turns_PG.ravel())
  calls, failures = sum(talk.calls for talk in talks), sum(talk.failures for talk in talks)
  metrics = {
    "tools/call_frequency": calls / len(talks),
    "tools/failure_frequency": failures / max(1, calls),
    "environment/turns": sum(len(talk.own) for talk in talks) / len(talks),
  }
  for kind, name in (("error", "errors"), ("timeout", "timeouts"), ("crash", "crashes")):
    metrics[f"environment/{name}"] = sum(talk.kind == kind for talk in talks)
  if any(talk.prompt_tokens for talk in talks):
    metrics["harness/prompt_tokens"] = sum(talk.prompt_tokens for talk in talks)
    metrics["harness/computed_tokens"] = sum(talk.computed_tokens for talk in talks)
    metrics["harness/lost_tokens"] = sum(talk.lost_tokens for talk in talks)
  names = dict.fromkeys(name for talk in talks for name in talk.metrics)
  values = {name: [talk.metrics[name] for talk in talks if name in talk.metrics] for name in names}
  return disjoint(metrics, {f"harness/{name}": float(np.mean(x)) for name, x in values.items()})


def staleness_metrics(versions: np.ndarray, current: int, mask_PGT: np.ndarray) -> dict[str, float]:
  """Metrics of the ages of a batch's tokens: the number of updates since each token was drawn.

  `staleness/share_0` to `staleness/share_2` are the shares of tokens of that age, and
  `staleness/share_3_or_more` is the share of older tokens. They add up to 1. If no token counts,
  all metrics are NaN.

  Args:
    versions: int [P, G, T], the version of the policy that drew each token. Axes of size 1 are
      broadcast.
    current: The version of the policy that learns from the tokens.
    mask_PGT: Nonzero at the tokens that count.
  """
  ages = (current - np.broadcast_to(versions, mask_PGT.shape))[mask_PGT != 0]
  if not ages.size:
    ages = np.full(1, np.nan)
  counted = {f"share_{age}": ages == age for age in range(3)} | {"share_3_or_more": ages >= 3}
  shares = {name: np.where(np.isnan(ages), np.nan, x).mean() for name, x in counted.items()}
  found = {"mean": ages.mean(), "min": ages.min(), "max": ages.max()} | shares
  return {f"staleness/{name}": float(value) for name, value in found.items()}


def score_metrics(rewards: Rewards, names: list[str]) -> dict[str, float]:
  """Mean and standard deviation of each function's scores, and how many scores are missing."""
  metrics = {}
  for name, scores_PG in zip(names, np.moveaxis(rewards.scores_PGJ, -1, 0), strict=True):
    scored = scores_PG[~np.isnan(scores_PG)]
    metrics[f"rewards/{name}/mean"] = float(scored.mean()) if scored.size else float("nan")
    metrics[f"rewards/{name}/std"] = _spread(scored)
    metrics[f"rewards/{name}/unscored"] = int(np.isnan(scores_PG).sum())
  return metrics


def source_metrics(
  rewards: Rewards, source_P: Sequence[str], sources: Sequence[str]
) -> dict[str, float]:
  """`reward` and `frac_reward_zero_std` of the prompts of each source of a mixture.

  Args:
    rewards: The scores of the reward functions, without the penalty for length.
    source_P: The source of each prompt.
    sources: All sources. The metrics of one without a prompt are NaN.
  """
  rewards_PG, differ_P = host_scores(rewards), groups_that_differ(rewards)
  metrics = {}
  for source in sources:
    is_of_P = np.array([one == source for one in source_P], bool)
    scored = rewards_PG[is_of_P][~np.isnan(rewards_PG[is_of_P])]
    metrics[f"reward/{source}"] = float(scored.mean()) if scored.size else float("nan")
    idle = float(1 - differ_P[is_of_P].mean()) if is_of_P.any() else float("nan")
    metrics[f"frac_reward_zero_std/{source}"] = idle
  return metrics


def check_metrics(rewards_PG: np.ndarray, checks_PG: np.ndarray) -> dict[str, float]:
  """The mean check, and the gap between the mean reward and it. Empty without a check.

  No update uses the check. A growing gap means that the policy learns to exploit the reward
  functions instead of being right.

  Args:
    rewards_PG: The rewards, NaN where no function scored.
    checks_PG: 1 for right completions, else 0. NaN without a check.
  """
  both = ~np.isnan(rewards_PG) & ~np.isnan(checks_PG)
  if not both.any():
    return {}
  check = float(checks_PG[both].mean())
  return {"check/mean": check, "check/gap": float(rewards_PG[both].mean()) - check}


def with_judgements(
  rows: list[dict[str, Any]], pass_rates_P: np.ndarray, checks_PG: np.ndarray
) -> list[dict[str, Any]]:
  """Adds `pass_rate` and, if it is known, `check` to the rows of completions.

  Args:
    rows: One dict per completion.
    pass_rates_P: The pass rates of the prompts before the step, NaN if unknown.
    checks_PG: 1 for right completions, else 0. NaN without a check.
  """
  rates_PG = np.broadcast_to(pass_rates_P[:, None], checks_PG.shape)
  return [
    row | {"pass_rate": _number(rate)} | ({} if np.isnan(check) else {"check": float(check)})
    for row, rate, check in zip(rows, rates_PG.ravel(), checks_PG.ravel(), strict=True)
  ]


def most_disputed_first(rows: list[dict[str, Any]], group_size: int) -> list[dict[str, Any]]:
  """Sorts groups of rows by their largest gap between reward and check, largest gap first."""
  groups = [rows[start : start + group_size] for start in range(0, len(rows), group_size)]

  def gap(group: list[dict[str, Any]]) -> float:
    gaps = [abs(row["reward"] - row["check"]) for row in group if _has_both(row)]
    return max(gaps, default=0.0)

  return [row for group in sorted(groups, key=gap, reverse=True) for row in group]


def _has_both(row: dict[str, Any]) -> bool:
  return row.get("reward") is not None and "check" in row


def completion_rows(
  rollouts: Rollouts,
  prompts: Sequence[Prompt],
  rewards_PG: np.ndarray,
  scores_PGJ: np.ndarray,
  names: list[str],
  extras_PG: np.ndarray | None = None,
) -> list[dict[str, Any]]:
  """Makes one JSON-ready dict per completion, for completions/ and the terminal.

  To replay a step, use the ids and log-probs and not the texts: special tokens have no text, so
  different ids may have the same text.

  Args:
    rollouts: The completions.
    prompts: The P prompts.
    rewards_PG: The rewards, without the penalty for length.
    scores_PGJ: The scores of the functions, and the penalty for length if it is on.
    names: The names of these scores.
    extras_PG: The values that functions passed to log_extra, as dicts by column.
  """
  rows, completions = [], rollouts.completions
  images_P = [shown(prompt.images) for prompt in prompts]
  for p, g in np.ndindex(rewards_PG.shape):
    length = int(completions.lengths_PG[p, g])
    scores = {
      f"rewards/{name}": _number(score) for name, score in zip(names, scores_PGJ[p, g], strict=True)
    }
    extras = {} if extras_PG is None else extras_PG[p, g]
    if rollouts.turns_PG is not None and rollouts.turns_PG[p, g] is not None:
      extras = {**rollouts.turns_PG[p, g].columns, **extras}
    row = {
      "prompt": prompts[p].text,
      "completion": rollouts.texts_PG[p, g],
      "reward": _number(rewards_PG[p, g]),
      **scores,
      **{f"extra/{column}": value for column, value in extras.items()},
      "length": length,
      "stopped_by": int(completions.stopped_by_PG[p, g]),
      "prompt_ids": prompts[p].ids,
      "completion_ids": completions.tokens_PGT[p, g, :length].tolist(),
      "logprobs": [_shortest(x) for x in completions.logprobs_PGT[p, g, :length]],
    }
    if "task" in prompts[p].example:
      row["task"] = str(prompts[p].example["task"])
    if prompts[p].images:
      row["images"] = images_P[p]
    if rollouts.turns_PG is not None and rollouts.turns_PG[p, g] is not None:
      row["turns"] = rollouts.turns_PG[p, g].as_json()
    if rollouts.branches is not None:
      G, rollout_B = rewards_PG.shape[1], rollouts.branches.rollout_PB[p]
      # The first G branches are the rows of the rollouts themselves.
      further_branches = rollouts.branches.turns_PB[p, G:][rollout_B[G:] == g]
      row["branches"] = [branch.as_json() for branch in further_branches if branch is not None]
    rows.append(row)
  return rows


def _shortest(value: np.floating) -> float:
  """The float with the fewest decimal digits that rounds to this float32."""
  return float(str(value))


def _spread(values: np.ndarray) -> float:
  """The sample standard deviation, with divisor n - 1. NaN for fewer than two values."""
  return float(values.std(ddof=1)) if values.size > 1 else float("nan")


def _lengths(lengths: np.ndarray, which: str) -> dict[str, float]:
  return {
    f"completions/mean_{which}length": float(lengths.mean()),
    f"completions/min_{which}length": float(lengths.min()),
    f"completions/max_{which}length": float(lengths.max()),
  }


def _number(value: float) -> float | None:
  return None if np.isnan(value) else float(value)
