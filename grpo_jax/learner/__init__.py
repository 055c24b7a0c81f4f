"""The learner: log-probs of completions that share their prompt, and one update."""

from grpo_jax.learner.packed import slots_of_batch
from grpo_jax.learner.router_bias import moved_biases
from grpo_jax.learner.token_stats import (
  StatsOptions,
  batch_stats,
  encoded,
  split_batch,
  whole_batch_stats,
)
from grpo_jax.learner.train_step import (
  Objective,
  UpdateRule,
  grpo,
  init_state,
  supervised,
  sync_reference,
  train_step,
)

__all__ = [
  "Objective",
  "StatsOptions",
  "UpdateRule",
  "batch_stats",
  "encoded",
  "grpo",
  "init_state",
  "moved_biases",
  "slots_of_batch",
  "split_batch",
  "supervised",
  "sync_reference",
  "train_step",
  "whole_batch_stats",
]
