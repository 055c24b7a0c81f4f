"""Word problems of one step, for a child of eight. Generated on the fly.

`Mia has 19 stickers. Paul gives Mia 11 more. How many stickers does Mia have now?` A problem is a
story with two numbers. A quarter of them add, a quarter subtract, a quarter multiply and a quarter
divide. The test split has other stories than the training split, so its accuracy measures how well
the model understands new stories.
"""

from collections.abc import Sequence
import functools
import random
from typing import Any, NamedTuple

from grpo_jax import calls
from grpo_jax.data.tasks.generated import Generated
from grpo_jax.settings import ConfigError

SIZES = {"train": 20_000, "test": 2_000}
OPERATIONS = ("+", "-", "*", "/")
MOST = 10**9  # the largest number that data.path may set

_NAMES = (
  "Ana Ben Carla David Emma Finn Grace Hugo Ivy Jonas Kira Leo Mia Noah Olga Paul Rosa Sam Tara"
  " Victor"
).split()
_THINGS = (
  "apples marbles books stickers pencils cookies shells coins cards balloons stamps buttons eggs"
  " toys"
).split()
_PLACES = ("box", "bag", "basket", "drawer")

# {A} and {B} are names. {a} and {b} are the numbers in the order of the operation: a - b, a / b.
_STORIES: dict[str, dict[str, tuple[str, ...]]] = {
  "train": {
    "+": (
      "{A} has {a} {things}. {B} gives {A} {b} more. How many {things} does {A} have now?",
      "{A} has {a} {things} and {B} has {b} {things}. How many {things} do they have together?",
      "There are {a} {things} in one {place} and {b} {things} in another {place}. How many {things}"
      " are there in all?",
      "{A} bought {a} {things} on Monday and {b} on Tuesday. How many {things} did {A} buy?",
      "{A} gave away {a} {things} and has {b} left. How many {things} did {A} have at first?",
      "{A} read {a} pages in the morning and {b} pages in the evening. How many pages did {A} read"
      " that day?",
      "{B} has {a} {things}. {A} has {b} more than {B}. How many {things} does {A} have?",
      "A bus carries {a} people. At the next stop {b} people get on. How many people are on the bus"
      " now?",
    ),
    "-": (
      "{A} has {a} {things}. {A} gives {b} of them to {B}. How many {things} does {A} have left?",
      "There were {a} {things} in the {place}. {A} took out {b}. How many {things} are still in the"
      " {place}?",
      "{A} has {a} {things} and {B} has {b}. How many more {things} does {A} have than {B}?",
      "{A} wants to collect {a} {things} and has {b} so far. How many more {things} does {A} need?",
      "{A} had {a} dollars and spent {b} dollars on {things}. How many dollars does {A} have left?",
      "{A} and {B} have {a} {things} together. {B} has {b} of them. How many {things} does {A}"
      " have?",
      "A book has {a} pages. {A} has read {b} pages. How many pages are left to read?",
      "{A} has {a} {things}. {B} has {b} fewer than {A}. How many {things} does {B} have?",
    ),
    "*": (
      "{A} has {a} bags with {b} {things} in each bag. How many {things} does {A} have?",
      "One ticket costs {b} dollars. How many dollars do {a} tickets cost?",
      "{A} reads {b} pages every day. How many pages does {A} read in {a} days?",
      "There are {a} rows of chairs with {b} chairs in each row. How many chairs are there?",
      "{A} gives {b} {things} to each of {a} friends. How many {things} does {A} give away?",
      "A box holds {b} {things}. How many {things} do {a} boxes hold?",
    ),
    "/": (
      "{A} shares {a} {things} equally among {b} friends. How many {things} does each friend get?",
      "{A} puts {a} {things} into boxes of {b}. How many boxes does {A} need?",
      "{b} tickets cost {a} dollars in total. How many dollars does one ticket cost?",
      "{A} walks {a} miles in {b} days, the same distance every day. How many miles does {A} walk"
      " each day?",
      "There are {a} chairs in {b} equal rows. How many chairs are in each row?",
      "{A} has {a} {things} in {b} bags, with the same number in each. How many {things} are in a"
      " bag?",
    ),
  },
  "test": {
    "+": (
      "A farmer has {a} cows. He buys {b} cows at the market. How many cows does he have then?",
      "{A} baked {a} rolls and {B} baked {b} rolls. How many rolls did they bake altogether?",
      "After {A} lost {a} {things}, {b} were left. How many {things} were there before?",
    ),
    "-": (
      "{A} picked {a} pears and ate {b} of them. How many pears remain?",
      "There are {a} children in the park. {b} of them go home. How many children are still there?",
      "A rope is {a} feet long. {A} cuts off {b} feet. How many feet long is the rest?",
    ),
    "*": (
      "A house has {a} floors with {b} windows on each floor. How many windows does it have?",
      "{A} saves {b} dollars a week. How many dollars does {A} save in {a} weeks?",
      "Each of {a} cats has {b} kittens. How many kittens are there?",
    ),
    "/": (
      "A teacher splits {a} children into {b} equal teams. How many children are in each team?",
      "{A} cuts {a} feet of rope into {b} equal parts. How many feet long is each part?",
      "{A} earns {a} dollars in {b} hours. How many dollars does {A} earn in an hour?",
    ),
  },
}


class Numbers(NamedTuple):
  """The numbers of the stories.

  Attributes:
    largest: The largest number of a sum or difference. Each problem draws one of several values. If
      the two numbers of a difference are equal, the first is increased by one.
    largest_factor: The largest factor of a product, and the largest divisor and quotient.
  """

  largest: Sequence[int] = (20, 99)
  largest_factor: int = 10


SMALL = Numbers()


def numbers_of(path: str) -> Numbers:
  """Reads the sizes of the numbers from data.path, such as `largest=999,largest_factor=99`.

  `largest` may be a list or tuple. Each problem draws one of its values.

  Raises:
    ConfigError: A name is unknown, or a value is not a whole number from 2 to 10^9.
  """
  key = "data.path"
  _, values = calls.parse(f"word_problems({path})", key)  # parameters are written as for rewards
  unknown = sorted(values.keys() - {*Numbers._fields})
  if unknown:
    raise ConfigError(
      f"{key}: word_problems has no {unknown[0]}; it has {' and '.join(Numbers._fields)}, such as"
      " largest=999,largest_factor=99"
    )
  largest = values.get("largest", SMALL.largest)
  factor = values.get("largest_factor", SMALL.largest_factor)
  found = Numbers(largest if isinstance(largest, tuple | list) else (largest,), factor)
  for number in (*found.largest, found.largest_factor):
    if type(number) is not int or not 2 <= number <= MOST:
      raise ConfigError(f"{key}: {number!r:.50} is no whole number from 2 to {MOST:,}")
  if not found.largest:
    raise ConfigError(f"{key}: largest has no number")
  return found


class WordProblems(Generated):
  """The examples of a split, "train" or "test". Example i depends on the split, i and the numbers.

  An example has the fields question, answer, solution and operation, which is one of + - * /.
  """

  def __init__(self, split: str, numbers: Numbers = SMALL) -> None:
    super().__init__(split, SIZES[split], functools.partial(_example, split, numbers))


def _example(split: str, numbers: Numbers, index: int) -> dict[str, Any]:
  """Example `index` of a split: a story with two numbers and one operation."""
  # Only random() is called, because Python promises that its sequence never changes.
  rng = random.Random(f"word_problems/{split}/{index}")
  operation = OPERATIONS[index % len(OPERATIONS)]
  a, b, result = _numbers(rng, operation, numbers)
  story = _one_of(_STORIES[split][operation], rng)
  first = int(rng.random() * len(_NAMES))
  second = (first + 1 + int(rng.random() * (len(_NAMES) - 1))) % len(_NAMES)  # never the first
  question = story.format(
    A=_NAMES[first],
    B=_NAMES[second],
    a=a,
    b=b,
    things=_one_of(_THINGS, rng),
    place=_one_of(_PLACES, rng),
  )
  return {
    "question": question,
    "answer": str(result),
    "solution": f"{a} {operation} {b} = {result}\n#### {result}",
    "operation": operation,
  }


def _numbers(rng: random.Random, operation: str, numbers: Numbers) -> tuple[int, int, int]:
  """Draws (first number, second number, result). Numbers are at least 2, and results at least 1."""
  if operation in "*/":
    first, second = (_between(2, numbers.largest_factor, rng) for _ in range(2))
    product = first * second
    return (first, second, product) if operation == "*" else (product, first, second)
  largest = _one_of(numbers.largest, rng)
  first, second = (_between(2, largest, rng) for _ in range(2))
  if operation == "+":
    return first, second, first + second
  least, most = sorted((first, second))
  most += least == most  # so that the difference is at least 1
  return most, least, most - least


def _between(least: int, most: int, rng: random.Random) -> int:
  return least + int(rng.random() * (most - least + 1))


def _one_of(values: Sequence[Any], rng: random.Random) -> Any:
  return values[int(rng.random() * len(values))]
