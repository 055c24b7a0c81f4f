"""Where a step's batch comes from: prompts, their completions and scores. Groups of equal rewards may be drawn anew."""

import dataclasses
from typing import Any

import jax
import numpy as np

from grpo_jax.data import loader
from grpo_jax.rewards import name_of
from grpo_jax.run import rollout
from grpo_jax.run.build import Run
from grpo_jax.settings import ConfigError
from grpo_jax.types import Batch, Completions, Scores


@dataclasses.dataclass(frozen=True)
class Drawn:
  """Groups on the host, the first axis of all."""

  where_P: np.ndarray  # int64, which training prompts
  out: Completions
  scored: rollout.Scored


@dataclasses.dataclass(frozen=True)
class Collected:
  """A batch on the mesh, without advantages, and what is known of it on the host."""

  batch: Batch
  scores: Scores
  drawn: Drawn
  prompts: loader.PromptBatch
  metrics: dict[str, float]  # of everything sampled

  def rows(self) -> list[dict[str, Any]]:
    """One object per completion, for completions/ and the terminal."""
    return rollout.rows(self.drawn.out, self.drawn.scored, self.prompts)


class Collector:
  """Compiled once; `collector(params, index, clock)` is a pure function of the weights and the step's index."""

  def __init__(self, run: Run):
    self._run, self._config = run, run.config
    self.prompts = run.prompts("train")
    algo, sampling = run.config.algo, run.config.sampling
    self._rounds = 1 + algo.max_resample_rounds if algo.dynamic_sampling else 1
    self._sample = run.sampler(sampling, run.config.batch.group_size)
    needs_greedy = algo.advantage == "greedy_baseline"
    self._greedy = (
      run.sampler(dataclasses.replace(sampling, temperature=0.0), 1) if needs_greedy else None
    )
    self._weights = run.reward_weights
    self._functions = (
      run.functions
    )  # what is wrong with the rewards is told before anything is written
    if algo.overlong and "overlong" in map(name_of, self._functions):
      raise ConfigError(
        "reward.functions: a function named overlong, beside algo.overlong; rename it, or set that to 0"
      )

  def __call__(self, params: Any, index: int, clock: Any) -> Collected:
    """`params` as Parameters.for_sampling gives them; `clock.lap(name)` is told what the time went to."""
    P, drawn, live = self._config.batch.prompts, [], 0
    while len(drawn) < self._rounds and live < P:
      number = index * self._rounds + len(drawn)
      where_P = loader.indices(self._config.seed, number, P, len(self.prompts))
      on_mesh, prompts, arrays = self._draw(self._sample, params, where_P, number)
      out = self._run.fetch(on_mesh)
      clock.lap("sample")
      drawn.append(Drawn(where_P, out, self._score(out, prompts)))
      live += int(drawn[-1].scored.differ_P.sum())
      clock.lap("reward")
    everything = _joined(drawn)
    chosen, live_P = everything, np.ones(P, np.float32)
    if self._rounds > 1:
      chosen, live_P = _chosen(everything, P)
      prompts = loader.prompt_batch(self.prompts, chosen.where_P)
      on_mesh, arrays = self._run.put((chosen.out, (prompts.prompts_PS, prompts.prompt_lengths_P)))
    greedy_P1K = self._greedy_scores(params, chosen.where_P, index, clock) if self._greedy else None
    scores = self._run.put(self._scores(chosen, live_P, greedy_P1K))
    batch = self._run.to_batch(on_mesh, *arrays, self._run.put(live_P))
    clock.lap("reward")
    return Collected(batch, scores, chosen, prompts, self._metrics(everything, live))

  def _draw(self, sampler, params, where_P, number):
    prompts = loader.prompt_batch(self.prompts, where_P)
    arrays = self._run.put((prompts.prompts_PS, prompts.prompt_lengths_P))
    return (
      sampler(params, *arrays, jax.random.fold_in(self._run.key("sample"), number)),
      prompts,
      arrays,
    )

  def _score(self, out, prompts):
    """Every process gets the first one's numbers, not its steps: it alone calls reward functions that are no models."""
    run, algo = self._run, self._config.algo
    scored = rollout.score(
      out, prompts, run.tokenizer.decode, self._functions, self._config.reward.weights
    )
    if algo.overlong:
      scored = rollout.with_overlong(scored, out, self._config.sampling.max_tokens, algo.overlong)
    # As a list: a dict would come back in another order, and the scores have the order of their weights.
    rewards_PG, scores = run.from_first_process((scored.rewards_PG, list(scored.scores.values())))
    return dataclasses.replace(
      scored, rewards_PG=rewards_PG, scores=dict(zip(scored.scores, scores))
    )

  def _greedy_scores(self, params, where_P, index, clock):
    """[P, 1, K], of each prompt's greedy completion."""
    on_mesh, prompts, _ = self._draw(self._greedy, params, where_P, index)
    out = self._run.fetch(on_mesh)
    clock.lap("sample")
    return np.stack(list(self._score(out, prompts).scores.values()), -1)

  def _scores(self, chosen, live_P, greedy_P1K):
    """What fills up a batch counts as not scored, and stays out of every mean."""
    scores_PGK = np.where(
      live_P[:, None, None], np.stack(list(chosen.scored.scores.values()), -1), np.float32(np.nan)
    )
    run, (rewards_PGT, ends_PGT) = self._run, (None, None)
    if self._config.algo.advantage == "process":
      of_steps = (
        np.zeros(chosen.out.tokens_PGT.shape, np.float32),
        np.zeros(chosen.out.tokens_PGT.shape, np.float32),
      )
      if run.is_first_process:
        of_steps = rollout.step_rewards(
          chosen.out, chosen.scored, self._weights, run.tokenizer.decode
        )
      rewards_PGT, ends_PGT = run.from_first_process(of_steps)
    return Scores(scores_PGK, greedy_P1K, rewards_PGT, ends_PGT)

  def _metrics(self, everything, live):
    metrics = rollout.metrics(everything.out, everything.scored)
    metrics["completions/tokens"] = int(everything.out.lengths_PG.sum())
    if self._rounds > 1:
      P, groups = self._config.batch.prompts, len(everything.where_P)
      metrics |= {
        "dynamic_sampling/rounds": groups / P,
        "dynamic_sampling/kept": min(live, P),
        "dynamic_sampling/dropped": groups - live,  # all rewards equal
        "dynamic_sampling/discarded": max(0, live - P),
      }  # more than the batch holds
    return metrics


def _joined(drawn):
  if len(drawn) == 1:
    return drawn[0]
  join = lambda *x: np.concatenate(x)
  scored = [d.scored for d in drawn]
  steps = {name: sum((s.steps[name] for s in scored), []) for name in scored[0].steps}
  return Drawn(
    join(*(d.where_P for d in drawn)),
    jax.tree.map(join, *(d.out for d in drawn)),
    rollout.Scored(
      sum((s.texts for s in scored), []),
      join(*(s.rewards_PG for s in scored)),
      {name: join(*(s.scores[name] for s in scored)) for name in scored[0].scores},
      steps,
    ),
  )


def _chosen(everything, P):
  """The first P groups whose rewards differ, and where there are fewer, others for their places: -> groups, 1 or 0 [P]."""
  differ = everything.scored.differ_P
  live = np.flatnonzero(differ)[:P]
  rows = np.concatenate([live, np.flatnonzero(~differ)[: P - len(live)]])
  s, G = everything.scored, everything.out.lengths_PG.shape[1]
  steps = {
    name: [values[p * G + g] for p in rows for g in range(G)] for name, values in s.steps.items()
  }
  take = lambda x: x[rows]
  scores = {name: take(values) for name, values in s.scores.items()}
  scored = rollout.Scored([s.texts[p] for p in rows], take(s.rewards_PG), scores, steps)
  return (
    Drawn(take(everything.where_P), jax.tree.map(take, everything.out), scored),
    (np.arange(P) < len(live)).astype(np.float32),
  )
