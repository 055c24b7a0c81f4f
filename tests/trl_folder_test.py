"""Folders that TRL saved after training from one of ours are used as they are.

tests/golden/make_trl.py made them, and wrote down what transformers completes with them.
"""

import dataclasses
import json
from pathlib import Path

from gsm8k_test import finish, start
import jax
import numpy as np
import pytest

from configs import arithmetic
from grpo_jax.config import from_dict
from grpo_jax.data.loader import prompt_batch
from grpo_jax.rollouts.complete import make_rollout
from grpo_jax.run.run import Run
from grpo_jax.settings import ConfigError

FOLDER = Path(__file__).parent / "golden/trl"


def run_of(name):
  config = from_dict(arithmetic.get_config().to_dict())
  model = dataclasses.replace(config.model, path=str(FOLDER / name))
  return Run(dataclasses.replace(config, model=model))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["now", "before"])
def test_greedy_completions_are_those_of_transformers(name):
  expected = json.loads((FOLDER / "greedy.json").read_text())[name]
  run = run_of(name)
  assert (run.tokenizer.vocab_size, run.tokenizer.stop_ids, run.tokenizer.pad_id) == (18, (1,), 0)
  rollout = make_rollout(run, 1, greedy=True, max_tokens=10)
  # 16 problems, so that they can be split over eight devices.
  prompts = prompt_batch(run.prompts("test"), np.arange(16))
  params = run.parameters.for_sampling(run.initial_params())
  texts_PG = rollout(params, prompts, jax.random.key(0)).texts_PG
  assert [text for (text,) in texts_PG[: len(expected)]] == expected
  assert len(set(expected)) > 8


def test_the_added_token_is_not_one_of_the_model():
  """To the files of an earlier version, transformers added it. To ours of now, it adds none."""
  assert "<|endoftext|>" in (FOLDER / "before/tokenizer.json").read_text()
  assert "<|endoftext|>" not in (FOLDER / "now/tokenizer.json").read_text()
  with pytest.raises(ConfigError, match="the character '<' is not in the vocabulary"):
    run_of("before").tokenizer.encode("1+<|endoftext|>")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["now", "before"])
def test_evaluate_takes_the_folder_as_it_is(name):
  flags = ["--config=configs/arithmetic.py", f"--config.model.path={FOLDER / name}"]
  lines = finish(start("evaluate", *flags, "--examples=16")).splitlines()
  assert lines[0] == f"{FOLDER / name}: 16 test problems of arithmetic"
  assert any("eval/accuracy" in line for line in lines)
