"""Counts the shapes of one colour and form in an image with several shapes.

A solution has one of two forms. The direct form is a guess, `#### 2`, which is off by at most one
and right in four of nine cases. The worked form is right. For each cell, row by row, it first says
whether the cell has a counted shape (x), another shape (o) or no shape (.): `x.o ..x o.. #### 2`.
"""

import random

from grpo_jax.data.tasks.drawn.canvas import COLORS, SHAPES, Problem, Shape, choose

ROWS = 3  # rows and columns of the grid, whose cells have at most one shape
MOST = 5  # the most shapes that are counted
OTHERS = 4  # the most shapes that are not counted


def problem(rng: random.Random) -> Problem:
  """A scene with 0 to MOST counted shapes (all numbers are equally likely) and other shapes."""
  cells = _shuffled(rng)
  name, color = choose(rng, SHAPES), choose(rng, [*COLORS])
  count = int(rng.random() * (MOST + 1))
  kinds = [(name, color)] * count
  for _ in range(1 + int(rng.random() * OTHERS)):
    other = (name, color)
    while other == (name, color):  # draws until it is no counted shape
      other = (choose(rng, SHAPES), choose(rng, [*COLORS]))
    kinds.append(other)
  shapes = tuple(_shape(rng, kind, cell) for kind, cell in zip(kinds, cells))
  marks = dict.fromkeys(range(ROWS**2), ".")
  marks |= {cell: "x" if kind == (name, color) else "o" for kind, cell in zip(kinds, cells)}
  steps = " ".join("".join(marks[ROWS * row + i] for i in range(ROWS)) for row in range(ROWS))
  glance = min(max(count + int(rng.random() * 3) - 1, 0), MOST)  # off by -1, 0 or 1
  return Problem(shapes, f"How many {color} {name}s?", str(count), steps, str(glance))


def _shape(rng: random.Random, kind: tuple[str, str], cell: int) -> Shape:
  """A shape of random size and position in its cell. `kind` is its form and colour."""
  width = 1 / ROWS
  radius = width * (0.28 + 0.12 * rng.random())
  row, column = divmod(cell, ROWS)
  y, x = (width * place + radius + (width - 2 * radius) * rng.random() for place in (row, column))
  return Shape(*kind, round(y, 3), round(x, 3), round(radius, 3))


def _shuffled(rng: random.Random) -> list[int]:
  """The cells in a random order."""
  return sorted(range(ROWS**2), key=lambda _: rng.random())
