"""A taskset of the package verifiers plays with the policy, and the policy learns from it."""

import types

import numpy as np
import pytest
from small_qwen import make_checkpoint, problems
from small_run import grpo_step, small_config, small_run, with_section

from grpo_jax.batches.collect import Collector
from grpo_jax.data.tasks import verifiers_tasks
from grpo_jax.environments.adapters import verifiers_player
from grpo_jax.scoring.scorers import Scorers
from grpo_jax.settings import ConfigError

TASKSET = """
import verifiers.v1 as vf

class Data(vf.TaskData):
  answer: str = ""

class Settings(vf.TaskConfig):
  most: int = 12

class Vowels(vf.Task[Data, vf.State, Settings]):
  @vf.reward
  async def vowels(self, trace: vf.Trace) -> float:
    text = trace.last_reply or ""
    return sum(text.count(vowel) for vowel in "aeiou") / self.config.most

  @vf.metric
  async def characters(self, trace: vf.Trace) -> float:
    return len(trace.last_reply or "")

class Config(vf.TasksetConfig):
  task: Settings = Settings()
  count: int = 8

class ToyVowels(vf.Taskset[Vowels, Config]):
  def load(self):
    for i in range(self.config.count):
      yield Vowels(Data(prompt=f"Ann has {i} boxes. How many?"), self.config.task)

__all__ = ["ToyVowels"]
"""


def test_without_the_package_or_the_taskset_the_error_is_one_line():
  with pytest.raises(
    ConfigError, match="pip install 'verifiers|taskset 'no-such' cannot"
  ) as caught:
    verifiers_tasks.load("no-such")
  assert "\n" not in str(caught.value)


def test_rewards_and_metrics_of_traces_have_their_names():
  def trace(**named):
    return types.SimpleNamespace(rewards={"right": types.SimpleNamespace(score=0.5)}, metrics=named)

  found = verifiers_player.metrics_of([trace(turns=2, late=None), trace(turns=3)])
  assert found == {"rewards/right": 1.0, "turns": 5}


@pytest.mark.slow
def test_rewards_rise_on_a_taskset(tmp_path, monkeypatch):
  pytest.importorskip("verifiers.v1", reason="pip install verifiers")
  (tmp_path / "toy_vowels.py").write_text(TASKSET)
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setenv("PYTHONPATH", str(tmp_path))
  corpus = [row["question"] + row["answer"] for row in problems(12)]
  make_checkpoint(tmp_path / "model", [*corpus, "user assistant"], every_id_is_text=True)
  config = with_section(small_config(), "model", path=str(tmp_path / "model"))
  taskset = "toy_vowels(count=6)"
  data = {"task": "verifiers", "path": taskset, "chat": True, "max_prompt_tokens": 48}
  config = with_section(config, "data", **data)
  config = with_section(config, "sampling", max_tokens=8)
  config = with_section(config, "environment", harness=f"verifiers:{taskset}")
  reward = {"functions": ("environment",), "workers": 1, "timeout": 300.0}
  config = with_section(config, "reward", **reward)
  config = with_section(config, "batch", prompts=2, group_size=8)
  run = small_run(with_section(config, "optimizer", learning_rate=5e-2))
  scorers = Scorers(run)
  try:
    step, store, _ = grpo_step(run, tmp_path / "run", Collector(run, scorers))
    state, _, _ = store.restore_or_init()
    rewards, gaps, named = [], [], []
    for index in range(20):
      state, metrics, _, _ = step(state, index)
      rewards.append(metrics["reward"])
      gaps.append(metrics["sampler/logprob_gap_max"])
      named.append([metrics["harness/rewards/vowels"], metrics["harness/characters"]])
  finally:
    scorers.close()
  print("rewards", np.round(rewards, 2))
  assert max(gaps) < 1e-4
  np.testing.assert_allclose([vowels for vowels, _ in named], rewards, rtol=1e-6)
  assert all(characters > 12 * vowels for vowels, characters in named)
  assert np.mean(rewards[-5:]) > 2 * np.mean(rewards[:5])
