"""The curriculum: records the pass rate of each training prompt, and chooses prompts by it."""

from collections.abc import Mapping
import dataclasses

import numpy as np

from grpo_jax.config import Curriculum
from grpo_jax.data import loader
from grpo_jax.settings import ConfigError

Memory = Mapping[str, np.ndarray | np.generic]

_EPOCHS = 2  # how many epochs a draw considers before it fills the batch with skipped prompts


@dataclasses.dataclass(frozen=True)
class PassRateCurriculum:
  """Draws prompts by their pass rates.

  The memory of a run is part of its host state:

  pass_rate: float32 [N], the fraction of each prompt's scored completions that passed when it was
    last drawn. NaN if the prompt was never drawn, or then had no scores.
  drawn_at: int32 [N], the GRPO step that last drew each prompt, from 0. -1 if none did.
  position: int64, how many entries of the shuffled order the run has considered.

  Attributes:
    settings: The section `curriculum` of the config.
    seed: The seed of the shuffled order.
    size: N, the number of training prompts.
  """

  settings: Curriculum
  seed: int
  size: int

  def initial(self) -> Memory:
    """The memory of a run that has drawn no prompt."""
    return {
      "pass_rate": np.full(self.size, np.nan, np.float32),
      "drawn_at": np.full(self.size, -1, np.int32),
      "position": np.int64(0),
    }

  def check(self, memory: Memory) -> None:
    """Raises ConfigError if the memory is of another number of training prompts."""
    size = len(memory["pass_rate"])
    if size != self.size:
      raise ConfigError(
        f"data.path: there are {self.size} training prompts, and the run has begun with {size}:"
        " give it the data that it has begun with"
      )

  def draw(self, memory: Memory, step: int, count: int) -> tuple[np.ndarray, Memory]:
    """Draws the next prompts.

    Each epoch visits the prompts in a new random order, as without a curriculum. It draws a prompt
    with its probability in `chances`, and otherwise skips it until the next epoch. If two epochs
    yield too few prompts, the first skipped ones fill the batch.

    Args:
      memory: The memory of the run.
      step: The GRPO step, from 0.
      count: How many prompts to draw.

    Returns:
      The indices of the prompts, int64 [count], and the memory with the new position.
    """
    position, chances = int(memory["position"]), self.chances(memory, step)
    # At least `count` entries are considered, so that skipped prompts can always fill the batch.
    end = position + max(_EPOCHS * self.size, count)
    taken, passed_over = np.empty(0, np.int64), np.empty(0, np.int64)
    while len(taken) < count and position < end:
      width = min(max(self.size, count), end - position)
      indices = loader.indices_at(self.seed, position + np.arange(width), self.size)
      is_taken = _uniform(self.seed, position, width) < chances[indices]
      # Entries after the one that completes the draw are left for later draws.
      looked_at = 1 + int(np.searchsorted(np.cumsum(is_taken), count - len(taken)))
      indices, is_taken = indices[:looked_at], is_taken[:looked_at]
      taken = np.concatenate([taken, indices[is_taken]])
      passed_over = np.concatenate([passed_over, indices[~is_taken]])
      position += len(indices)
    filled_up = np.concatenate([taken, passed_over])[:count]
    return filled_up, {**memory, "position": np.int64(position)}

  def chances(self, memory: Memory, step: int) -> np.ndarray:
    """The probability, float64 [N], with which an epoch draws each prompt at this step.

    It is largest at a pass rate of 1/2 or an unknown one. A prompt at 0 or 1 rests for some steps.
    """
    rates = np.asarray(memory["pass_rate"], np.float64)
    teaches = np.where(np.isnan(rates), 1, 4 * rates * (1 - rates))
    chances = self.settings.floor + (1 - self.settings.floor) * teaches
    rests = (teaches == 0) & (step - memory["drawn_at"] <= self.settings.rest)
    return np.where(rests, 0, chances)

  def learn(
    self, memory: Memory, step: int, indices_P: np.ndarray, scores_PG: np.ndarray
  ) -> Memory:
    """The memory after the completions of drawn prompts were scored.

    Args:
      memory: The memory before the step.
      step: The GRPO step, from 0.
      indices_P: The indices of the drawn prompts.
      scores_PG: The scores of the completions, NaN where no function scored.
    """
    rates, drawn_at = memory["pass_rate"].copy(), memory["drawn_at"].copy()
    rates[indices_P], drawn_at[indices_P] = self.pass_rates(scores_PG), step
    return {**memory, "pass_rate": rates, "drawn_at": drawn_at}

  def pass_rates(self, scores_PG: np.ndarray) -> np.ndarray:
    """The fraction of each prompt's scored completions that passed, float32 [P]."""
    scored_PG = ~np.isnan(scores_PG)
    passed_P = (scored_PG & (scores_PG >= self.settings.pass_score)).sum(1)
    counts_P = scored_PG.sum(1)
    return np.where(counts_P, passed_P / np.maximum(counts_P, 1), np.nan).astype(np.float32)

  def metrics(self, memory: Memory) -> dict[str, float]:
    """Metrics under curriculum/ about the prompts with a known pass rate."""
    rates = memory["pass_rate"][~np.isnan(memory["pass_rate"])]
    metrics = {"curriculum/seen": len(rates) / self.size}
    if len(rates):
      metrics["curriculum/pass_rate"] = float(rates.mean())
      metrics["curriculum/solved"] = float((rates == 1).mean())
      metrics["curriculum/hopeless"] = float((rates == 0).mean())
    return metrics


def _uniform(seed: int, position: int, count: int) -> np.ndarray:
  """Uniform numbers in [0, 1) for `count` positions from `position` on, the same in every run."""
  # Philox, as for the order of an epoch: numpy guarantees that its raw words never change.
  first, words = divmod(position, 4)  # Philox makes four words for each value of its counter
  counter = np.array([first, 0, 0, 1], np.uint64)
  philox = np.random.Philox(counter=counter, key=np.array([seed % 2**64, 2**64 - 1], np.uint64))
  return philox.random_raw(words + count)[words:] / 2.0**64
