"""docs/way_of_a_batch.svg says what the code does: its files, functions and arrays exist."""

import ast
from pathlib import Path
import re
import sys

from floors_test import PACKAGE, modules_imported
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
import draw_batch
from draw_batch import STATIONS

STRUCTS = (PACKAGE / "types.py").read_text()
PAIRS = list(zip(STATIONS, STATIONS[1:]))


def source(file):
  return (PACKAGE / file).read_text()


def reached(file):
  """Every file that a file imports, and those that these import."""
  found, todo = set(), [PACKAGE / file]
  while todo:
    path = todo.pop()
    if path not in found:
      found.add(path)
      todo += [one for one in modules_imported(path) if one]
  return found


def test_the_picture_is_drawn_from_the_table():
  assert draw_batch.PICTURE.read_text() == draw_batch.picture()


@pytest.mark.parametrize("station", STATIONS, ids=lambda station: station.file)
def test_functions_and_helpers_exist(station):
  defined = {getattr(node, "name", "") for node in ast.parse(source(station.file)).body}
  assert set(station.functions) <= defined
  for file, _ in station.helpers:
    assert PACKAGE / file in reached(station.file), f"{station.file} does not use {file}"


@pytest.mark.parametrize("here, there", PAIRS, ids=lambda station: station.file)
def test_a_station_calls_the_next_and_both_know_what_passes(here, there):
  """The loop calls all that the parts of a run compile, and a learner its objective."""
  callers = (here.file, STATIONS[0].file)
  assert any(PACKAGE / there.file in reached(file) for file in callers)
  for array, _ in here.makes:
    for file in (here.file, there.file):
      assert re.search(rf"\b{array}\b", source(file) + STRUCTS), f"{file} has no {array}"


def test_a_way_through_other_files_is_noticed():
  assert PACKAGE / "training/loop.py" not in reached("algo/objective.py")
  assert PACKAGE / "algo/objective.py" in reached("learner/train_step.py")
