"""Whether updates still change the policy."""

from collections.abc import Mapping

from grpo_jax.settings import RunFailed


class SkippedUpdates:
  """Counts the updates in a row that were skipped because their gradient was not finite.

  After such a row the policy does not recover: its parameters stay, so the next gradient is no
  better.

  Attributes:
    in_a_row: How many there are up to now.
  """

  def __init__(self, limit: int) -> None:
    """`limit` is learner.max_skipped_updates."""
    self._limit = limit
    self.in_a_row = 0

  def count(self, metrics: Mapping[str, float], updates: int) -> None:
    """Counts those of a step.

    Args:
      metrics: The step's metrics.
      updates: How many updates the step made.
    """
    skipped = metrics.get("skipped_updates", metrics.get("warm_start/skipped_updates", 0))
    self.in_a_row = self.in_a_row + updates if skipped >= updates else 0

  @property
  def are_too_many(self) -> bool:
    """Whether the limit is reached."""
    return 0 < self._limit <= self.in_a_row

  def failure(self, newest_checkpoint: int | None) -> RunFailed:
    """The error that ends the run."""
    saved = "no checkpoint is saved"
    if newest_checkpoint is not None:
      saved = f"the newest checkpoint, of step {newest_checkpoint}, is from before"
    return RunFailed(
      f"the last {self.in_a_row} updates were skipped because their gradient was not finite, so"
      f" nothing is learned any more (learner.max_skipped_updates); {saved}. Lower"
      " optimizer.learning_rate in a new run, or look for what is not finite"
    )
