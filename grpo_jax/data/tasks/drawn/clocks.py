"""Reading the hands of a clock, to five minutes."""

import math
import random

import numpy as np

from grpo_jax.data.tasks.drawn.canvas import COLORS, Problem, blank, choose

MINUTES = 5  # times are multiples of this
_DARK = (30, 30, 40)
# (colour, y, x, radius, hour, minute)
Clock = tuple[str, float, float, float, int, int]


def problem(rng: random.Random) -> Problem:
  """A clock of random colour, size and position. The answer is H:MM, from 1:00 to 12:55."""
  hour = 1 + int(rng.random() * 12)
  minute = MINUTES * int(rng.random() * (60 // MINUTES))
  radius = 0.38 + 0.08 * rng.random()
  y, x = (radius + (1 - 2 * radius) * rng.random() for _ in range(2))
  clock = (choose(rng, [*COLORS]), round(y, 3), round(x, 3), round(radius, 3), hour, minute)
  return Problem(clock, "What time is it?", f"{hour}:{minute:02d}")


def draw(scene: tuple[int, Clock]) -> np.ndarray:
  """Draws (size, clock) with a rim, twelve marks, a short hour hand and a long minute hand."""
  size, (color, y, x, radius, hour, minute) = scene
  image = blank(size)
  down, right = (np.mgrid[:size, :size] + 0.5) / size - np.reshape([y, x], (2, 1, 1))
  distance = np.hypot(down, right) / radius
  image[(distance <= 1) & (distance > 0.92)] = COLORS[color]
  for number in range(12):
    image[_on_ray(down, right, number / 12, 0.8 * radius, 0.92 * radius, 0.03 * radius)] = _DARK
  image[_on_ray(down, right, minute / 60, 0.0, 0.75 * radius, 0.04 * radius)] = COLORS[color]
  of_hour = (hour + minute / 60) / 12
  image[_on_ray(down, right, of_hour, 0.0, 0.45 * radius, 0.07 * radius)] = _DARK
  return image


def _on_ray(
  down: np.ndarray, right: np.ndarray, turn: float, begin: float, end: float, width: float
) -> np.ndarray:
  """Whether points, `down` and `right` of the clock's centre, are on a ray from the centre.

  The ray points up at `turn` 0 and rotates clockwise, once for 1. It reaches from the distance
  `begin` to `end`, and is 2 * `width` wide.
  """
  angle = 2 * math.pi * turn
  along = right * math.sin(angle) - down * math.cos(angle)
  across = right * math.cos(angle) + down * math.sin(angle)
  return (along >= begin) & (along <= end) & (np.abs(across) <= width)
