"""Finds the one shape of a grid that has another colour or form than the rest."""

import random

from grpo_jax.data.tasks.drawn.canvas import COLORS, SHAPES, Problem, Shape, choose

ROWS = 3  # rows and columns of the grid


def problem(rng: random.Random) -> Problem:
  """A grid in which one shape differs. The answer is its number, row by row from the top left."""
  name, color = choose(rng, SHAPES), choose(rng, [*COLORS])
  odd = (choose(rng, [other for other in SHAPES if other != name]), color)
  if rng.random() < 0.5:  # in half of the problems, the colour differs instead
    odd = (name, choose(rng, [other for other in COLORS if other != color]))
  place = int(rng.random() * ROWS**2)
  shapes = []
  for cell in range(ROWS**2):
    row, column = divmod(cell, ROWS)
    # Even the largest shape, with a radius of 0.38 cells, stays in its cell.
    y, x = ((at + 0.5 + 0.12 * (rng.random() - 0.5)) / ROWS for at in (row, column))
    radius = (0.3 + 0.08 * rng.random()) / ROWS
    kind = odd if cell == place else (name, color)
    shapes.append(Shape(*kind, round(y, 3), round(x, 3), round(radius, 3)))
  return Problem(tuple(shapes), "Which one is different, 1 to 9?", str(place + 1))
