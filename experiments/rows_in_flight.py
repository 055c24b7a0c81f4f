"""Says how many bytes sampling moves with all rows of a step in flight, half of them and so on.

  python experiments/rows_in_flight.py

It seats rows of given lengths as `sampler.stream.Stream` does, without a model. Each round moves
the weights once and, of each seat, logits and slots of the cache: all slots without the kernel for
decoding, those of its own tokens with it. Prompts are read once for each of their places.
"""

import argparse
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from grpo_jax.model.attention.decode import SLOTS
from grpo_jax.model.config import ModelConfig
from grpo_jax.sampler import seats as seats_lib
from grpo_jax.sampler.logits import Decoding
from grpo_jax.sampler.sampling import Sampler, sizes_up_to


class Shape(NamedTuple):
  """What a recipe decodes on one device. Weights, tokens of the cache and logits are in bytes."""

  prompts: int
  members: int
  tokens: int
  prompt_tokens: int
  weights: float
  token: float
  logits: float
  by_kernel: bool


class Rounds(NamedTuple):
  """Some rounds of a chunk: their number, the seats, the places, the slots, the tokens there."""

  number: int
  rows: int
  places: int
  slots: int
  own: int


SHAPES = {
  "0.5B, v5e": Shape(64, 8, 512, 320, 0.96e9, 12_288, 3 * 4 * 151_936, False),
  "7B, a v5p of 16": Shape(8, 8, 2048, 512, 15.2e9, 57_344, 3 * 4 * 152_064, True),
}


def simulated(lengths_PG: np.ndarray, rows: int, shape: Shape) -> Iterator[Rounds]:
  """The rounds in which rows of these lengths are drawn, at most `rows` of them together."""
  P, G = lengths_PG.shape
  config = ModelConfig(
    vocab_size=2, embed_dim=1, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=1, mlp_dim=1
  )
  sampler = Sampler(config, Decoding(shape.tokens), 10**9, rows)
  pace, columns = sampler.pace(P, G), sampler.programs.columns
  sizes = sizes_up_to(shape.tokens, SLOTS if shape.by_kernel else 1)
  seats = seats_lib.no_one(P, G, pace.grid)
  slots, lengths, drawn = sizes[0], lengths_PG.reshape(-1), np.zeros(P * G, int)
  batch = 1
  while not (seats.all_seated and (seats.row_NQ == seats_lib.NOBODY).all()):
    seats_lib.fill_places(seats, batch)
    if not seats.queue:
      seats_lib.fill_places(seats, batch)
    batch = pace.prompts_at_once
    new = seats_lib.take_seats(seats)
    seats_lib.move_together(seats, pace.smaller)
    row = seats.row_NQ.reshape(-1)
    seat = np.flatnonzero(row != seats_lib.NOBODY)
    row = row[seat]
    written = max(int(drawn[row].max()) - 1, 0)
    if slots == written < shape.tokens:
      slots = next(size for size in sizes if size > written)
    drawn[new] = 1  # without a round
    left = lengths[row] - drawn[row]
    smaller = [grid.rows for grid in pace.smaller if grid.rows < seats.grid.rows]
    most = max(0, len(row) - max(smaller) - 1) if smaller else len(row)
    if not seats.all_seated:
      most = int(seats_lib.IDLE_SHARE * seats.grid.rows)
    ends = np.sort(left[left > 0])
    number = min(columns - 1, slots - written, int(ends[-1]) if len(ends) else 0)
    if most < len(ends):
      number = min(number, int(ends[most]))
    drawn[row] += np.minimum(number, left)
    yield Rounds(number, seats.grid.rows, seats.grid.places, slots, int(drawn[row].sum()))
    seats_lib.leave(seats, seat[drawn[row] == lengths[row]])


def moved(rounds: Rounds, shape: Shape) -> float:
  """The bytes of some rounds."""
  own = rounds.own if shape.by_kernel else rounds.rows * rounds.slots
  cached = own + rounds.places * shape.prompt_tokens
  return rounds.number * (shape.weights + rounds.rows * shape.logits + cached * shape.token)


def main() -> None:
  argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
  rng = np.random.default_rng(0)
  for name, shape in SHAPES.items():
    T, size = shape.tokens, (shape.prompts, shape.members)
    kinds = {
      "none ends early": np.full(size, T),
      "lognormal, median 200": rng.lognormal(np.log(200), 0.35, size),
      "long tails: lognormal, median T / 10": rng.lognormal(np.log(T / 10), 1.0, size),
      "geometric, mean T / 8": rng.geometric(8 / T, size),
      "T / 16, and T for one of 20": np.where(rng.random(size) < 0.95, T // 16, T),
    }
    for kind, lengths_PG in kinds.items():
      lengths_PG = np.clip(lengths_PG.astype(int), 1, T)
      print(f"{name}, {kind} (mean {lengths_PG.mean():.0f})")
      for share in (1, 2, 4):
        rows = lengths_PG.size // share
        all_rounds = list(simulated(lengths_PG, rows, shape))
        size_GB = sum(moved(rounds, shape) for rounds in all_rounds) / 1e9
        number = sum(rounds.number for rounds in all_rounds)
        print(f"  {rows:5} rows: {size_GB:8,.0f} GB in {number:6,} rounds")


if __name__ == "__main__":
  main()
