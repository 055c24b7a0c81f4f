"""Draws simple shapes with numpy, and makes the examples of tasks about them."""

from collections.abc import Callable
import functools
import random
from typing import Any, NamedTuple
import zlib

import numpy as np

from grpo_jax.data.images.source import Drawing
from grpo_jax.data.tasks.generated import Generated
from grpo_jax.settings import ConfigError

SIZE = 64  # default height and width in pixels
SMALLEST, LARGEST = 32, 1024  # the range of data.path
WORKED_SHARE = 0.4  # the fraction of solutions with steps, in tasks that have steps
SPLIT_SIZES = {"train": 20_000, "test": 2_000}
COLORS = {
  "red": (214, 40, 40),
  "green": (42, 157, 80),
  "blue": (40, 90, 214),
  "yellow": (240, 190, 30),
}
SHAPES = ("circle", "square", "triangle")
ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 #?.,:"


class Shape(NamedTuple):
  """A shape of a scene, with its centre and its radius as fractions of the image's size."""

  name: str
  color: str
  y: float
  x: float
  radius: float


class Problem(NamedTuple):
  """A question of a task about an image, with its answer.

  Attributes:
    scene: The description of the image to draw.
    question: The question.
    answer: The right answer.
    steps: The steps to the answer, or "" if it needs none.
    glance: A guess without the steps, often wrong. "" means the right answer.
  """

  scene: tuple[Any, ...]
  question: str
  answer: str
  steps: str = ""
  glance: str = ""


def examples(
  task: str,
  split: str,
  path: str,
  make: Callable[[random.Random], Problem],
  draw: Callable[[Any], np.ndarray],
) -> Generated:
  """The examples of a split. Example i depends only on the task, the split and i.

  Args:
    task: The name of the task.
    split: "train" or "test".
    path: data.path: the height and width of the images in pixels, or "".
    make: make(rng) -> a problem. It may only call rng.random(), because Python promises that this
      sequence never changes.
    draw: draw((size, scene)) -> the image, uint8 [size, size, 3].

  Raises:
    ConfigError: `path` is not a size in the allowed range.
  """
  size = _size(path)
  example = functools.partial(_example, task, split, size, make, draw)
  return Generated(split, SPLIT_SIZES[split], example)


def choose(rng: random.Random, choices: Any) -> Any:
  """Draws one of the choices, all with the same probability."""
  return choices[int(rng.random() * len(choices))]


def blank(size: int, color: tuple[int, int, int] = (250, 250, 250)) -> np.ndarray:
  """An image of one colour, uint8 [size, size, 3]."""
  return np.full((size, size, 3), color, np.uint8)


def draw_shapes(scene: tuple[int, tuple[Shape, ...]]) -> np.ndarray:
  """Draws (size, shapes), uint8 [size, size, 3]. Later shapes cover earlier ones."""
  size, shapes = scene
  image = blank(size)
  y, x = (np.mgrid[:size, :size] + 0.5) / size
  for shape in shapes:
    image[_inside(shape, y, x)] = COLORS[shape.color]
  return image


def _inside(shape: Shape, y: np.ndarray, x: np.ndarray) -> np.ndarray:
  """Whether the points (y, x), as fractions of the image's size, are inside a shape."""
  down, right, radius = y - shape.y, x - shape.x, shape.radius
  if shape.name == "circle":
    return down**2 + right**2 <= radius**2
  if shape.name == "square":
    return np.maximum(np.abs(down), np.abs(right)) <= 0.85 * radius
  return (np.abs(down) <= radius) & (np.abs(right) <= (down + radius) / 2)


def _example(
  task: str,
  split: str,
  size: int,
  make: Callable[[random.Random], Problem],
  draw: Callable[[Any], np.ndarray],
  index: int,
) -> dict[str, Any]:
  """Example `index` of a split: a drawn problem, whose image has `size` pixels on each side.

  The other arguments are as in `examples`.
  """
  rng = random.Random(f"{task}/{split}/{index}")
  problem = make(rng)
  while _split_of(problem) != split:
    problem = make(rng)
  # Most solutions are guesses, which are often wrong. So reinforcement learning can still improve
  # the model after the warm start, by writing the steps.
  direct = f"#### {problem.glance or problem.answer}"
  worked = f"{problem.steps} #### {problem.answer}"
  is_worked = problem.steps and rng.random() < WORKED_SHARE
  return {
    "image": Drawing(draw, (size, problem.scene), size, size),
    "question": problem.question,
    "solution": worked if is_worked else direct,
    "answer": problem.answer,
  }


def _split_of(problem: Problem) -> str:
  """The split of a scene: "test" for about one in ten. Splits share no scene."""
  return "test" if zlib.crc32(repr(problem.scene).encode()) % 10 == 0 else "train"


def _size(path: str) -> int:
  """The height and width in data.path. Raises ConfigError for a size out of range."""
  if not path:
    return SIZE
  if path.isascii() and path.isdigit() and SMALLEST <= int(path) <= LARGEST:
    return int(path)
  raise ConfigError(
    f"data.path={path!r}: this task draws its images; give their height and width in pixels,"
    f" {SMALLEST} to {LARGEST}, or leave data.path empty for {SIZE}"
  )
