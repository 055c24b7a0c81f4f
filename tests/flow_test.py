"""The groups of a run: which are opened, and which a step learns from, whenever scores arrive."""

from concurrent.futures import Future
import json

import jax
import numpy as np
import pytest
from small_run import G, P, small_config, small_run, with_reward, with_section

from grpo_jax.asynchronous.ahead import AheadInTurn
from grpo_jax.batches import flow as flow_lib
from grpo_jax.batches.collect import Collector
from grpo_jax.batches.curriculum import PassRateCurriculum
from grpo_jax.batches.flow import VersionedParams
from grpo_jax.batches.groups import ScoredGroups
from grpo_jax.pending import Pending
from grpo_jax.rollouts.player import Played
from grpo_jax.scoring.scorer import Report
from grpo_jax.scoring.scorers import Scorers
from grpo_jax.timing import Clock
from grpo_jax.types import Rewards


class Anyhow:
  """Plays groups that end in any order, and scores them in another, some chunks later."""

  def __init__(self, flow, seed, differs):
    self.opened, self._playing, self._unscored = [], [], []
    self._flow, self._differs, self._rng = flow, differs, np.random.default_rng(seed)

  def submit(self, groups):
    self.opened += [group.number for group in groups]
    self._playing += [group.number for group in groups]

  def cancel(self):
    self._playing = []

  def _some(self, things):
    """Takes some of them out of a list, in any order."""
    places = np.flatnonzero(self._rng.random(len(things)) < 0.4)
    taken = [things[place] for place in self._rng.permutation(places)]
    things[:] = [thing for place, thing in enumerate(things) if place not in places]
    return taken

  def advance(self):
    for future in self._some(self._unscored):
      future.set_result(None)
    ended = self._some(self._playing)
    lots = np.array_split(ended, self._rng.integers(1, 3)) if ended else []
    return [Played(lot.tolist(), None) for lot in lots if len(lot)]

  def score(self, played):
    """Stands for `Flow._begin_scores`."""
    future, numbers = Future(), np.array(played.numbers)
    self._unscored.append(future)
    scores_PGJ = np.zeros((len(numbers), G, 1), np.float32)
    scores_PGJ[:, 0, 0] = self._differs[numbers]
    groups = ScoredGroups(
      indices_P=numbers,
      temperature_P=np.ones(len(numbers)),
      version_P=np.zeros(len(numbers), int),
      rollouts=None,
      rewards=Rewards(scores_PGJ=scores_PGJ, weights=(1.0,)),
      extras_PG=np.full((len(numbers), G), None),
      checks_PG=np.zeros((len(numbers), G)),
    )
    pending = Pending(lambda: (groups, Report()), [future])
    self._flow._lots.append(flow_lib._Lot(played.numbers, pending))


ROUNDS = 2


@pytest.fixture(scope="module")
def collector():
  config = small_config(dynamic_sampling=True, max_resample_rounds=ROUNDS, kl_coef=0.0)
  run = small_run(config)
  return Collector(run, Scorers(run))


def drawn_anyhow(collector, monkeypatch, seed, differs, steps, ahead):
  """The numbers of the groups of each step, those that were learned, and those that were opened."""
  flow = collector.flow
  player = Anyhow(flow, seed, differs)
  monkeypatch.setattr(flow_lib, "SOON", 0.0)
  monkeypatch.setattr(flow, "_player", player)
  monkeypatch.setattr(flow, "_begin_scores", player.score)
  flow.restart(0, 0)
  drawn, learned = [], []
  for step in range(steps):
    while not flow.is_drawn:
      flow.advance(VersionedParams(None, 0), min(step + ahead, steps - 1), None)
      # Never more than the steps that are begun may have.
      assert flow.next - flow.first <= (1 + ROUNDS) * P * (1 + ahead)
    groups = flow.take().result()
    choice = collector._groups_to_learn(groups._replace(prompts=object()))
    drawn.append(groups.groups.indices_P.tolist())
    learned.append(choice.groups.indices_P[choice.live_P > 0].tolist())
    assert flow.first == groups.after
    if not ahead:  # nothing is drawn in vain
      assert flow.next == flow.first
  return drawn, learned, player.opened


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("share", [0.15, 0.5, 0.9])
def test_a_step_learns_from_the_first_groups_that_differ_in_whatever_order_scores_arrive(
  share, ahead, collector, monkeypatch
):
  """Where too few differ, the step has those that do among the most that it may draw."""
  steps, differs = 4, np.random.default_rng(1).random(400) < share
  expected, learned, first = [], [], 0
  for _ in range(steps):
    ends = first + 1 + np.flatnonzero(differs[first : first + (1 + ROUNDS) * P])
    after = int(ends[P - 1]) if len(ends) >= P else first + (1 + ROUNDS) * P
    expected.append([*range(first, after)])
    learned.append([n for n in expected[-1] if differs[n]])
    first = after
  assert (max(map(len, expected)) == (1 + ROUNDS) * P) == (share < 0.5)
  for seed in range(4):
    found = drawn_anyhow(collector, monkeypatch, seed, differs, steps, ahead)
    assert found[:2] == (expected, learned)
    assert found[2][:first] == [*range(first)] and (ahead or len(found[2]) == first)


def test_no_group_is_opened_that_could_fall_into_a_later_step(collector, monkeypatch):
  """A step that ends at its limit of groups has used fewer than P whose rewards differ."""
  flow = collector.flow
  most = flow._most_groups_of_step
  monkeypatch.setattr(flow, "next", flow.first + most)
  monkeypatch.setattr(flow, "_differ", {flow.first + i: i == 0 for i in range(most)})
  assert flow._count_to_open(flow.step) == 0
  assert flow._count_to_open(flow.step + 1) == P


# The curriculum.


@pytest.mark.parametrize("staleness", [0, 2])
def test_prompts_depend_on_scores_of_the_steps_that_their_own_policy_has_seen(
  staleness, tmp_path, monkeypatch
):
  """Other scores in step 1 change the prompts of step 2 + max_staleness, and none before."""
  for split in ("train", "test"):
    rows = [{"question": f"{i}+1=", "answer": "0"} for i in range(9)]
    (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
  source = (
    "def reward(completions, **_):\n  return [float(i % 2) for i in range(len(completions))]\n"
  )
  config = with_reward(small_config(kl_coef=0.0), tmp_path, source)
  config = with_section(config, "data", task="columns", path=str(tmp_path), prompt="{question}")
  config = with_section(config, "curriculum", floor=0.01, rest=1)
  config = with_section(config, "rollout", max_staleness=staleness)
  config = config.__class__(**{**vars(config), "steps": 3 + staleness})
  run = small_run(config)
  collector, params = Collector(run, Scorers(run)), run.initial_params()
  learn = PassRateCurriculum.learn

  def prompts(changed):
    def learned(self, memory, step, indices_P, scores_PG):
      scores_PG = np.ones_like(scores_PG) if step == changed else scores_PG
      return learn(self, memory, step, indices_P, scores_PG)

    monkeypatch.setattr(PassRateCurriculum, "learn", learned)
    ahead, host, found = AheadInTurn(collector, config), {"num_tokens": np.int64(0)}, []
    for index in range(config.steps):
      collected = ahead(params, index, host, Clock())
      host = collected.host
      found.append([row["prompt"] for row in collected.rows][::G])
    return found

  plain, other, later = prompts(None), prompts(1), prompts(2)
  assert other[: 2 + staleness] == plain[: 2 + staleness] and other[-1] != plain[-1]
  assert later == plain and jax.process_count() == 1
