"""Tasks that draw their images: the answers are right, and training and test share no scene."""

import numpy as np
import pytest

from grpo_jax.data.images.source import Drawing
from grpo_jax.data.tasks import tasks
from grpo_jax.data.tasks.drawn import canvas, clocks, count_shapes, odd_one_out
from grpo_jax.rewards import call
from grpo_jax.rewards.answer import CallLog
from grpo_jax.settings import ConfigError

NAMES = ("count_shapes", "clocks", "odd_one_out")


@pytest.mark.parametrize("name", NAMES)
def test_examples(name):
  task = tasks.TASKS[name]("")
  assert len(task.train) == 20_000 and len(task.test) == 2_000
  one, again = task.train[7], tasks.TASKS[name]("").train[7]
  assert one == again and (one["image"].pixels() == again["image"].pixels()).all()
  pixels = one["image"].pixels()
  assert pixels.shape == (64, 64, 3) and pixels.dtype == np.uint8
  assert one["image"].size() == (64, 64)
  assert one["solution"].startswith("#### ")
  if name != "count_shapes":
    assert one["solution"] == f"#### {one['answer']}"
  assert {*one["question"], *one["solution"]} <= {*task.characters()}
  scenes = [
    {repr(split[i]["image"].scene) for i in range(500)} for split in (task.train, task.test)
  ]
  assert not scenes[0] & scenes[1] and min(map(len, scenes)) > 480


@pytest.mark.parametrize("name", NAMES)
def test_other_sizes(name):
  example = tasks.TASKS[name]("112").train[0]
  assert example["image"].pixels().shape == (112, 112, 3)
  for path in ("0", "many", "100000", "-64", "64.0"):
    with pytest.raises(ConfigError, match=r"data\.path"):
      tasks.TASKS[name](path)


def test_an_image_is_drawn_once_for_the_completions_of_its_prompt():
  """Each completion has a copy of its own, which a reward function may change."""
  drawn = []

  def draw(scene):
    drawn.append(scene)
    return np.zeros((8, 8, 3), np.uint8)

  first, second = (Drawing(draw, scene, 8, 8) for scene in ("first", "second"))
  given = {"images": [[first], [first], [second]]}
  images = call.arguments(lambda **columns: None, given, step=1, log=CallLog(3))["images"]
  images[0][0].putpixel((0, 0), (1, 1, 1))
  assert images[1][0].getpixel((0, 0)) == (0, 0, 0)
  assert drawn == ["first", "second"]


def test_counts_are_those_of_the_scene():
  """Shapes do not touch, so that a count of coloured parts of the image is the answer."""
  answers = []
  for i in range(60):
    example = tasks.count_shapes("96").train[i]
    _, shapes = example["image"].scene
    _, _, color, plural = example["question"].rstrip("?").split()
    found = sum((shape.color, shape.name) == (color, plural[:-1]) for shape in shapes)
    assert example["answer"] == str(found)
    answers.append(found)
    pixels = example["image"].pixels()
    assert parts((pixels != 250).any(-1)) == len(shapes)
  assert {*answers} == set(range(count_shapes.MOST + 1))


def test_some_solutions_say_what_each_cell_holds():
  """Those are right. The others are answers at a glance, which may be one off."""
  worked, glances = 0, []
  for i in range(60):
    example = tasks.count_shapes("").train[i]
    steps, _, answer = example["solution"].partition("#### ")
    if not steps:
      glances.append(int(answer) - int(example["answer"]))
      continue
    assert answer == example["answer"]
    worked += 1
    _, shapes = example["image"].scene
    _, _, color, plural = example["question"].rstrip("?").split()
    rows = steps.split()
    for shape in shapes:
      counts = (shape.color, shape.name) == (color, plural[:-1])
      assert rows[int(shape.y * 3)][int(shape.x * 3)] == ("x" if counts else "o")
    assert sum(row.count(".") for row in rows) == 9 - len(shapes)
  assert 15 <= worked <= 33
  assert {*glances} == {-1, 0, 1} and glances.count(0) < 0.6 * len(glances)


def parts(mask):
  """How many connected parts a mask has."""
  left, count = {*zip(*np.nonzero(mask))}, 0
  while left:
    count += 1
    edge = [left.pop()]
    while edge:
      y, x = edge.pop()
      near = {(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)} & left
      left -= near
      edge += near
  return count


def test_hands_point_to_the_time():
  """At 3:00 the long hand points up, and the short one to the right."""
  pixels = clocks.draw((100, ("red", 0.5, 0.5, 0.45, 3, 0)))
  red, dark = canvas.COLORS["red"], (30, 30, 40)
  assert tuple(pixels[30, 50]) == red and tuple(pixels[20, 50]) == red
  assert tuple(pixels[50, 62]) == dark and tuple(pixels[50, 75]) == (250, 250, 250)
  pixels = clocks.draw((100, ("blue", 0.5, 0.5, 0.45, 6, 30)))  # half past: between 6 and 7
  assert tuple(pixels[80, 50]) == canvas.COLORS["blue"]
  assert tuple(pixels[66, 46]) == dark


def test_one_is_odd():
  for i in range(60):
    example = tasks.odd_one_out("").train[i]
    kinds = [(shape.name, shape.color) for shape in example["image"].scene[1]]
    odd = kinds[int(example["answer"]) - 1]
    assert len(kinds) == odd_one_out.ROWS**2 and kinds.count(odd) == 1 and len({*kinds}) == 2
