"""The learner: log-probs of completions that share their prompt, and updates of the policy."""

from grpo_jax.learner.by_slots import MicroBatchPass, SlotPlaces, Update, logprobs_pass, places_on
from grpo_jax.learner.objectives import Objective, grpo, supervised
from grpo_jax.learner.packed import split_batch
from grpo_jax.learner.router_bias import moved_biases
from grpo_jax.learner.token_stats import StatsOptions, batch_stats, encoded
from grpo_jax.learner.train_step import UpdateRule, init_state, sync_reference, train_step

__all__ = [
  "MicroBatchPass",
  "Objective",
  "SlotPlaces",
  "StatsOptions",
  "Update",
  "UpdateRule",
  "batch_stats",
  "encoded",
  "grpo",
  "init_state",
  "logprobs_pass",
  "moved_biases",
  "places_on",
  "split_batch",
  "supervised",
  "sync_reference",
  "train_step",
]
