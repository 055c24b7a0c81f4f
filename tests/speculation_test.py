"""experiments/speculation.py counts the passes that a drafter would save."""

from pathlib import Path
import sys

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))
import speculation


def test_what_followed_the_longest_match_last_is_proposed():
  text = [1, 2, 3, 4, 1, 2, 3, 5, 9, 2, 3]
  assert speculation.proposal(text, text, 2) == [5, 9]  # [2, 3] stood before 4 and, later, before 5
  assert speculation.proposal([7, 3], text, 4) == [5, 9, 2, 3]  # only [3] is there
  assert speculation.proposal([8], text, 2) == ()


@pytest.mark.parametrize(
  "completion, before, k, passes",
  [
    ([1, 2, 3, 4], [6, 7], 2, 4),  # nothing is found
    ([1, 2, 3, 4], [9, 1, 2, 3, 4], 2, 2),  # 9 leads to 1 and 2, and then 3 is drawn
    ([1, 2, 3, 4], [9, 1, 2, 3, 4], 4, 1),
    ([1, 2, 5, 4], [9, 1, 2, 3, 4], 4, 2),  # 5 is drawn where 3 was proposed
  ],
)
def test_a_pass_yields_what_was_accepted_and_a_token_more(completion, before, k, passes):
  assert speculation.passes([0, 9], completion, before, k) == passes


def test_a_row_looks_into_itself_where_there_is_nothing_before():
  assert speculation.passes([5, 6, 7, 8, 5], [6, 7, 8, 1], None, 3) == 1
