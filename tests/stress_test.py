"""The stress test: its cells can be run, its rewards are what they say, its figures are right."""

from pathlib import Path
import sys
from unittest import mock

import numpy as np
import pytest

from grpo_jax.data.tasks.arithmetic import Arithmetic, split_of
from grpo_jax.rewards.functions.final_number import strict
from grpo_jax.rewards.functions.worked_steps import equations
from grpo_jax.run.checks import check_config

sys.path.append(str(Path(__file__).parents[1] / "experiments"))
import stress
import stress_cells
import stress_rewards

OTHER = dict(prompts=["1+2=", "3+4="], answer=["3", "7"])


def line(level="a", method="grpo", seed=0, accuracy=(0.0, 0.5), **more):
  return dict(level=level, method=method, seed=seed, accuracy=list(accuracy), **more)


# Cells.


@pytest.mark.slow
def test_every_cell_has_a_config_that_can_be_run(tmp_path):
  cells = list(stress_cells.cells(1))
  assert len(cells) == len(set(cells))
  longest = {}
  for operands in {level.operands for level in stress_cells.LEVELS.values()}:
    answers = [example["question"] for example in Arithmetic("test", operands)[:200]]
    longest[operands] = max(len(";".join(equations(one)) + ";#### 99") for one in answers)
  for cell in cells[:: len(cells) // 150]:
    config = cell.config(tmp_path)
    check_config(config)
    assert config.algo.uses_reference  # so that every run reports its KL
    room = config.sampling.max_tokens * (1 - config.algo.overlong)
    assert room > longest[stress_cells.LEVELS[cell.level].operands]
  levels = {level for levels in stress_cells.REGIMES.values() for level in levels}
  assert levels == set(stress_cells.LEVELS) == {cell.level for cell in cells}


def test_the_most_telling_cells_come_first_and_all_seeds_of_a_method_together():
  cells = list(stress_cells.cells(2))
  levels = list(dict.fromkeys(cell.level for cell in cells))
  assert tuple(levels[: len(stress_cells.ORDER)]) == stress_cells.ORDER
  assert [cell.seed for cell in cells[:4]] == [0, 1, 0, 1]
  assert cells[0].method == cells[1].method != cells[2].method


def test_levels_of_a_family_differ_in_nothing_that_a_program_reads():
  """`stress.shared_programs` leaves these settings out when it compares configs."""
  family = stress_cells.family
  assert family(stress_cells.BASE) == family("32 updates, 3e-4") == family("flipped 20%")
  assert family(stress_cells.BASE) == family("start 1%")
  for other in ("2 updates, 3e-4", "4 updates, 1e-3", "4 operands", "bonus 0.1", "top-p 0.9"):
    assert family(stress_cells.BASE) != family(other)


def test_programs_are_shared_by_configs_that_differ_in_nothing_they_read(tmp_path):
  made = []

  class Counted(stress.Programs):
    def __init__(self, config, mesh, parameters):
      made.append(config)

  def programs(level, method="dapo", seed=0):
    config = stress_cells.Cell(level, method, seed).config(tmp_path)
    return stress.shared_programs(config, None, None)

  with mock.patch.object(stress, "SharedPrograms", Counted), mock.patch.dict(stress._kept):
    first = programs(stress_cells.BASE)
    assert first is programs(stress_cells.BASE, seed=1) is programs("start 1%")
    assert first is programs("16 updates, 3e-4") is programs("flipped 20%")
    assert first is programs("start 1%, 48 steps")
    assert len(made) == 1
    for level in ("4 updates, 1e-3", "2 updates, 3e-4", "bonus 0.1", "top-p 0.9"):
      assert programs(level) is not first
    assert programs(stress_cells.BASE, "cispo") is not first


def test_a_variant_differs_from_its_preset_in_what_its_name_says(tmp_path):
  def algo(method):
    return stress_cells.Cell(stress_cells.BASE, method, 0).config(tmp_path).algo

  assert (algo("grpo").kl_coef, algo("grpo, no KL").kl_coef) == (0.04, 1e-12)
  narrow, wide = algo("gspo"), algo("gspo, 16 x bounds")
  assert (narrow.clip_low, wide.clip_low) == (3e-4, pytest.approx(4.8e-3))


def test_longer_sums_have_so_many_operands_and_keep_their_split():
  for split in ("train", "test"):
    for example in Arithmetic(split, 6)[:50]:
      question = example["question"]
      assert len(question.replace("-", "+").split("+")) == 6
      assert eval(question[:-1]) == int(example["answer"]) and split_of(question) == split
  assert Arithmetic("train", 4)[3] == Arithmetic("train")[3]


def test_runs_from_other_warm_starts_are_noticed():
  lines = [line(stress_cells.BASE, accuracy=(0.01, 0.8))]
  assert stress.same_start(line("flipped 20%", accuracy=(0.01, 0.5)), lines)
  assert not stress.same_start(line("flipped 20%", accuracy=(0.02, 0.5)), lines)
  for other in (line("start 1%"), line("4 operands"), line(stress_cells.BASE, seed=1)):
    assert stress.same_start(other, lines)


# Rewards.


def test_so_many_rewards_are_noisy():
  count = 4000
  texts = [f"#### {i % 2}" for i in range(count)]
  columns = dict(completions=texts, answer=["1"] * count, prompts=["q"] * count, step=3)
  right = np.array(strict(completions=texts, answer=columns["answer"]))
  flipped = np.array(stress_rewards.noisy(**columns, rate=0.2))
  one_sided = np.array(stress_rewards.noisy(**columns, rate=0.2, kind="false_positives"))
  assert abs((flipped != right).mean() - 0.2) < 0.03
  assert (one_sided[right == 1] == 1).all() and abs(one_sided[right == 0].mean() - 0.2) < 0.04
  assert (stress_rewards.noisy(**columns, rate=0.0) == right).all()
  assert stress_rewards.noisy(**columns, rate=0.2) == flipped.tolist()
  columns["step"] = 4
  assert stress_rewards.noisy(**columns, rate=0.2) != flipped.tolist()


def test_the_bonus_is_in_proportion_to_the_length_and_waste_is_beyond_the_worked_solution():
  logged = {}
  texts = ["1+2=3;#### 3", "3+4=7;3+4=7;#### 8"]
  scores = stress_rewards.long(
    completions=texts, **OTHER, log_metric=logged.__setitem__, bonus=0.5, most=64
  )
  assert scores == [1 + 0.5 * 12 / 64, 0.5 * 18 / 64]
  assert logged == {"wasted": 6 / 30}


# Figures.


@pytest.fixture(scope="module")
def page():
  pytest.importorskip("matplotlib")
  import stress_page

  return stress_page


def test_a_collapse_is_a_fall_to_less_than_half_that_lasts(page):
  def collapsed(*accuracy):
    return page.collapsed_at(line(accuracy=accuracy))

  assert collapsed(0.1, 0.8, 0.3, 0.2) == 2 * stress_cells.EVERY
  assert collapsed(0.1, 0.8, 0.3, 0.7) is None and collapsed(0.05, 0.0) is None
  assert collapsed(0.1, 0.8, 0.3, 0.7, 0.3) == 4 * stress_cells.EVERY
  assert page.steps_to(line(accuracy=(0.1, 0.79, 0.8))) == 2 * stress_cells.EVERY
  assert page.steps_to(line()) is None


def test_a_method_breaks_where_it_is_ten_points_below_its_best_so_far(page):
  lines = [
    line(level, accuracy=[end]) for level, end in zip("abcd", (0.8, 0.9, 0.81, 0.5), strict=True)
  ]
  runs = page.by_cell(lines)
  assert page.breaks_at(runs, "abcd", "grpo") == "d" and page.breaks_at(runs, "abc", "grpo") == "-"


def test_the_variance_of_methods_is_told_from_that_of_seeds(page):
  """A table whose analysis can be done by hand: effects 3, 0, -3 and 1, -1, and a rest of 0.5."""
  rest = 0.5 * np.array([[1, -1], [-1, 1], [0, 0]])
  accuracy = np.array([[3], [0], [-3]]) + np.array([1, -1]) + rest
  found = page.variance(accuracy)
  assert found.methods == pytest.approx(3) and found.seeds == pytest.approx(np.sqrt(2))
  assert found.rest == pytest.approx(np.sqrt(1 / 2)) and found.F == pytest.approx(18 / 0.5)
  assert found.p == pytest.approx(1 / (1 + 36))  # F(2, 2): 1 / (1 + F)
  assert found.p_ranks == pytest.approx(np.exp(-4 / 2))  # ranks 3, 2, 1 twice: chi2(2) = 4
  # The 5% point of the range of 3 means with 2 degrees of freedom, from a printed table.
  assert found.apart == pytest.approx(8.33 * np.sqrt(1 / 2 / 2), rel=1e-3)


def test_an_interval_is_that_of_student(page):
  assert page.half_width([1.0, 2.0, 3.0]) == pytest.approx(4.302653 / np.sqrt(3), rel=1e-5)
  assert np.isnan(page.half_width([1.0]))


def test_tables_take_the_places_of_their_names(page):
  text = "a\n<!-- x -->\nold\n<!-- end -->\nb\n<!-- y -->\n<!-- end -->\n"
  assert page.with_tables(text, {"x": ["|1|", "|2|"]}) == text.replace("old", "|1|\n|2|")
