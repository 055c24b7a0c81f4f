"""Curriculum: what a run remembers of each training prompt, and which prompts it draws."""

from collections.abc import Mapping
import dataclasses

import numpy as np

from grpo_jax.config import Curriculum
from grpo_jax.data import loader
from grpo_jax.settings import ConfigError

Memory = Mapping[str, np.ndarray | np.generic]

_EPOCHS = 2  # how many times a draw looks at every prompt before it takes some that it passed over


@dataclasses.dataclass(frozen=True)
class PassRateCurriculum:
  """Draws prompts by their pass rates.

  The memory of a run is part of its host state:

  pass_rate: float32 [N], the fraction of a prompt's scored completions that passed when it was last
    drawn. NaN if it was not drawn, or not scored.
  drawn_at: int32 [N], the GRPO step of that draw, from 0. -1 if it was not drawn.
  position: int64, how many places of the shuffled order the run has looked at.

  Attributes:
    settings: The section `curriculum` of the config.
    seed: The seed of the order.
    size: N, the number of training prompts.
  """

  settings: Curriculum
  seed: int
  size: int

  def initial(self) -> Memory:
    """The memory of a run that has drawn nothing."""
    return {
      "pass_rate": np.full(self.size, np.nan, np.float32),
      "drawn_at": np.full(self.size, -1, np.int32),
      "position": np.int64(0),
    }

  def check(self, memory: Memory) -> None:
    """Raises ConfigError if the memory is that of other training prompts."""
    size = len(memory["pass_rate"])
    if size != self.size:
      raise ConfigError(
        f"data.path: there are {self.size} training prompts, and the run has begun with {size}:"
        " give it the data that it has begun with"
      )

  def draw(self, memory: Memory, step: int, count: int) -> tuple[np.ndarray, Memory]:
    """The next prompts.

    Every epoch goes through the prompts in a new random order, as without a curriculum. A prompt is
    taken with the probability that `chances` gives it, else it is passed over until the next epoch.
    If two epochs have too few, the first ones that were passed over fill the batch.

    Args:
      memory: The pass rates that the run remembers, and its position in the order.
      step: The GRPO step, from 0.
      count: How many prompts a batch has.

    Returns:
      Their indices, int64 [count], and the memory with the new position.
    """
    position, chances = int(memory["position"]), self.chances(memory, step)
    last = position + max(_EPOCHS * self.size, count)
    taken, passed_over = np.empty(0, np.int64), np.empty(0, np.int64)
    while len(taken) < count and position < last:
      width = min(max(self.size, count), last - position)
      indices = loader.indices_at(self.seed, position + np.arange(width), self.size)
      is_taken = _uniform(self.seed, position, width) < chances[indices]
      looked_at = 1 + int(np.searchsorted(np.cumsum(is_taken), count - len(taken)))
      indices, is_taken = indices[:looked_at], is_taken[:looked_at]
      taken = np.concatenate([taken, indices[is_taken]])
      passed_over = np.concatenate([passed_over, indices[~is_taken]])
      position += len(indices)
    filled_up = np.concatenate([taken, passed_over])[:count]
    return filled_up, {**memory, "position": np.int64(position)}

  def chances(self, memory: Memory, step: int) -> np.ndarray:
    """The probability with which each prompt is taken when its turn comes, float64 [N]."""
    rates = np.asarray(memory["pass_rate"], np.float64)
    teaches = np.where(np.isnan(rates), 1, 4 * rates * (1 - rates))
    chances = self.settings.floor + (1 - self.settings.floor) * teaches
    rests = (teaches == 0) & (step - memory["drawn_at"] <= self.settings.rest)
    return np.where(rests, 0, chances)

  def learn(
    self, memory: Memory, step: int, indices_P: np.ndarray, scores_PG: np.ndarray
  ) -> Memory:
    """The memory after prompts were drawn and their completions scored.

    Args:
      memory: The memory before.
      step: The GRPO step, from 0.
      indices_P: The prompts.
      scores_PG: Their completions' scores, NaN where no function scored one.
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
    """Metrics under curriculum/, of the prompts that the run has drawn."""
    rates = memory["pass_rate"][~np.isnan(memory["pass_rate"])]
    metrics = {"curriculum/seen": len(rates) / self.size}
    if len(rates):
      metrics["curriculum/pass_rate"] = float(rates.mean())
      metrics["curriculum/solved"] = float((rates == 1).mean())
      metrics["curriculum/hopeless"] = float((rates == 0).mean())
    return metrics


def _uniform(seed: int, position: int, count: int) -> np.ndarray:
  """Uniform numbers of [0, 1) for the places from `position` on. A place always has the same."""
  # As the order of an epoch: numpy promises that the words of Philox never change.
  first, words = divmod(position, 4)  # a counter of Philox makes four words
  counter = np.array([first, 0, 0, 1], np.uint64)
  philox = np.random.Philox(counter=counter, key=np.array([seed % 2**64, 2**64 - 1], np.uint64))
  return philox.random_raw(words + count)[words:] / 2.0**64
