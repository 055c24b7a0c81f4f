"""TRL's quick start, ported: GRPOConfig's fields, a conversational reward, messages as prompts."""

import dataclasses
import importlib.util
import json
import os
from pathlib import Path
import shlex
import subprocess
import sys
import types

import pytest

import grpo_jax
from grpo_jax import cli
from grpo_jax.around.trl import from_trl
from grpo_jax.around.trl_fields import LOSSES
from grpo_jax.batches.collect import Collector
from grpo_jax.data.tasks.tasks import make_task
from grpo_jax.run.checks import check_config
from grpo_jax.scoring.scorers import Scorers
from grpo_jax.settings import ConfigError
from tests.small_qwen import make_checkpoint, problems
from tests.small_run import small_run

QWEN = Path(__file__).parent / "golden/tokenizers/qwen"
REWARDS = """
import re

def accuracy_reward(completions, solution, log_extra=None, **kwargs):
  contents = [completion[0]["content"] for completion in completions]
  return [float(str(len(text)) == gold) + len(text) / 100 for text, gold in zip(contents, solution)]

def asked(completions, prompts, **kwargs):
  return [float(prompt[-1]["role"] == "user") for prompt in prompts]
"""
CONFIG = """
from grpo_jax import from_trl

def get_config():
  return from_trl(
    dict(
      output_dir="Qwen2-0.5B-GRPO",
      per_device_train_batch_size=16,
      num_generations=2,
      max_completion_length=8,
      learning_rate=1e-3,
      max_steps=2,
      logging_steps=1,
      run_name="quick start",
    ),
    model="{folder}/model",
    reward_funcs=["{folder}/rewards.py:accuracy_reward", "{folder}/rewards.py:asked"],
    train_dataset="{folder}/prompts.jsonl",
  )
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """What a user of TRL brings, without the model, and the config that reads as theirs."""
  folder = tmp_path_factory.mktemp("from_trl")
  rows = [
    {"prompt": [{"role": "user", "content": problem["question"]}], "solution": "13"}
    for problem in problems(12)
  ]
  (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  (folder / "rewards.py").write_text(REWARDS)
  (folder / "config.py").write_text(CONFIG.replace("{folder}", str(folder)))
  return folder


def test_the_config_of_the_quick_start_can_be_run(folder, capsys):
  config = cli.config_of([f"--config={folder}/config.py"])
  captured = capsys.readouterr()
  assert not captured.out  # stdout may be for a program, as with log.console=json
  assert "learning_rate=0.001: optimizer.learning_rate=0.001" in captured.err
  assert "run_name: left out" in captured.err and "it is the flag --workdir" in captured.err
  without_model = {"model.path": "", "data.tokenizer": str(QWEN), "reward.workers": 0}
  scorers = Scorers(small_run(config.replace(without_model)))
  Collector(scorers._run, scorers)  # sees what the functions read: `asked` only reads the prompts
  found = {function.__name__: found for function, found in scorers._caller._conversational}
  assert found == {"accuracy_reward": True, "asked": True}


@pytest.mark.slow
def test_the_quick_start_runs_with_two_flags(folder, tmp_path):
  make_checkpoint(folder / "model", [problem["question"] for problem in problems(12)])
  flags = [f"--config={folder}/config.py", f"--workdir={tmp_path}/run"]
  ended = subprocess.run(
    [sys.executable, "-m", "grpo_jax.train", *flags],
    capture_output=True,
    text=True,
    cwd=Path(__file__).parents[1],
    env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"},
  )
  assert ended.returncode == 0 and "finished" in ended.stdout, ended.stderr
  rows = grpo_jax.read_metrics(tmp_path / "run")
  assert [row["step"] for row in rows if "reward" in row] == [1, 2]
  assert all(row["rewards/accuracy_reward/mean"] > 0 for row in rows if "reward" in row)
  assert all(row["rewards/asked/mean"] == 1 for row in rows if "reward" in row)


def test_the_flags_give_the_same_config(folder):
  said = []
  config = from_trl({"max_steps": 3, "loss_type": "dr_grpo"}, model="m's", say=said.append)
  flags = shlex.split(said[-1].partition(": ")[2])
  assert cli.config_of(["--config=default", *flags]) == config
  loaded = grpo_jax.load_config(folder / "config.py", {"seed": 3})
  assert cli.config_of([f"--config={folder}/config.py", "--config.seed=3"]) == loaded


def test_what_fields_become():
  def made(**fields):
    config = from_trl({"max_steps": 60, **fields}, say=None)
    check_config(config)
    return config

  # 64 completions of 8 prompts are sampled for 4 updates of 16, each of which is used twice.
  config = made(
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    steps_per_generation=8,
    num_iterations=2,
    save_steps=16,
    warmup_steps=5,
  )
  assert (config.batch.prompts, config.algo.minibatches, config.steps) == (8, 4, round(60 / 8))
  assert config.algo.old_logprobs == "recomputed" and config.optimizer.warmup_steps == 5
  assert config.checkpoint.every == 2
  assert made(generation_batch_size=32).algo.minibatches == 4
  assert made(warmup_steps=0.1).optimizer.warmup_steps == 6
  # Below 1, these are shares of all updates: 12, 15 and 3 of 60, and of 2 updates in a step.
  shares = made(save_steps=0.2, logging_steps=0.05, log_completions=True)
  assert (shares.checkpoint.every, shares.log.every, shares.log.completions_every) == (12, 3, 3)
  assert made(save_steps=0.2, num_iterations=2).checkpoint.every == 6
  assert made(eval_strategy="steps", eval_steps=0.25).eval.every == 15
  assert made(loss_type="cispo", epsilon_high=5.0).algo.clip_high == 4.0
  assert made(epsilon=0.1).algo.clip_high == 0.1
  assert made(scale_rewards=False).algo.advantage == "group_centered"
  corrected = made(use_vllm=True, vllm_importance_sampling_mode="token_truncate").algo
  assert (corrected.correction, corrected.correction_level) == ("truncate", "token")
  assert made(beta=0.1, sync_ref_model=True, ref_model_sync_steps=3).algo.ref_sync_steps == 3
  for loss in LOSSES:
    made(loss_type=loss, **({"epsilon_high": 5.0} if loss == "cispo" else {}))
  several = from_trl({"max_steps": 1}, reward_funcs=["strict", "think_format"], say=None)
  assert several.reward.weights == (1.0, 1.0)


@pytest.mark.parametrize(
  "report_to, tensorboard, trackers",
  [
    (None, False, ()),
    ("none", False, ()),
    ([], False, ()),
    ("tensorboard", True, ()),
    ("wandb", False, ("wandb",)),
    (["tensorboard", "trackio", "mlflow", "swanlab"], True, ("mlflow", "trackio", "swanlab")),
    ("all", True, ("trackio",)),
  ],
)
def test_what_report_to_becomes(report_to, tensorboard, trackers, monkeypatch):
  found = {"trackio": "trackio/__init__.py", "wandb": None}  # ./wandb is a folder of a run
  is_there = {name: types.SimpleNamespace(origin=origin) for name, origin in found.items()}
  monkeypatch.setattr(importlib.util, "find_spec", is_there.get)
  lines = []
  log = from_trl({"max_steps": 1, "report_to": report_to, "project": "sums"}, say=lines.append).log
  assert (log.tensorboard, log.trackers) == (tensorboard, trackers)
  assert log.project == ("sums" if trackers else "grpo_jax")
  (line,) = [line for line in lines if line.startswith("report_to=")]
  assert f"log.tensorboard={tensorboard}, log.trackers={list(trackers)}" in line


def test_functions_and_a_config_object_as_trl_takes_them(folder):
  def short_ones(completions, **kwargs):
    return [0.0] * len(completions)

  @dataclasses.dataclass
  class GRPOConfig:  # as TRL leaves one: with what it has computed
    num_generations: int = 8
    learning_rate: float = 1e-6
    generation_batch_size: int | None = 16
    steps_per_generation: int | None = 2
    report_to: list = dataclasses.field(default_factory=list)
    num_train_epochs: float = 2.0

  config = from_trl(
    GRPOConfig(num_generations=4, generation_batch_size=32, steps_per_generation=4),
    reward_funcs=short_ones,
    train_dataset=f"{folder}/prompts.jsonl",
    say=None,
  )
  assert config.reward.functions == ("short_ones",) and config.batch.prompts == 8
  assert config.steps == round(3.0 * 12 / 8) and config.data.chat


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"num_generation": 4}, "'num_generation' is not known: did you mean num_generations?"),
    ({"neftune_noise_alpha": 5}, "'neftune_noise_alpha' is not known: it has no counterpart"),
    ({"repetition_penalty": 1.1}, "repetition_penalty=1.1: the learner would not know"),
    ({"loss_type": "ppo"}, "loss_type='ppo': choose one of grpo, dapo"),
    ({"loss_type": "cispo"}, "epsilon_high=None: with loss_type='cispo' .* above 1, such as 5.0"),
    ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type='polynomial': choose one of"),
    ({"num_generations": 3}, "generation_batch_size=None: 8 completions are no whole groups of 3"),
    ({"max_steps": -1}, "max_steps=-1: the number of rows is not known: set max_steps"),
    ({"learning_rate": "fast"}, "optimizer.learning_rate must be a number, got 'fast'"),
    ({"num_generations": 0}, "num_generations is 0: it must be a whole number of at least 1"),
    ({"per_device_train_batch_size": "8"}, "per_device_train_batch_size is '8': it must be"),
    ({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, "no whole updates of 2"),
    ({"scale_rewards": []}, "scale_rewards=.*: "),
    ({"report_to": ["wandb", "comet_ml"]}, "report_to=.*: 'comet_ml' is not here: choose among"),
    ({"generation_kwargs": {"bad_words": "Wait"}}, "bad_words must be a list of texts, got 'Wait'"),
    ({"generation_kwargs": {"bad_words": ["Wait", 5]}}, "bad_words must be a list of texts"),
    ([1], r"\[1\] is no GRPOConfig and no dict of its fields"),
  ],
)
def test_what_is_refused_is_one_line(fields, message):
  args = {"max_steps": 1, **fields} if isinstance(fields, dict) else fields
  with pytest.raises(grpo_jax.ConfigError, match=message) as error:
    from_trl(args, say=None)
  assert "\n" not in str(error.value)


def test_data_that_cannot_be_prompts(tmp_path):
  (tmp_path / "rows.jsonl").write_text('{"question": "1+1"}\n')
  with pytest.raises(grpo_jax.ConfigError, match="no column 'prompt', but question"):
    from_trl(train_dataset=f"{tmp_path}/rows.jsonl", say=None)
  for kwargs, error in (
    (dict(train_dataset=5), "train_dataset: train is of type int: give a list of dicts, a Dataset"),
    (dict(train_dataset=[]), "train_dataset: train has no rows"),
    (
      dict(train_dataset=[{"question": "1"}]),
      r"^from_trl: train_dataset: train\[0\] has no column 'prompt', but question",
    ),
    (dict(eval_dataset=[{"prompt": "1"}]), "eval_dataset without train_dataset"),
    (dict(train_dataset=[{"prompt": "1"}], eval_dataset={"a": []}), "name others in eval.tasks"),
  ):
    with pytest.raises(grpo_jax.ConfigError, match=error):
      from_trl({"max_steps": 1}, say=None, **kwargs)


class LoraConfig:
  """The fields of `peft.LoraConfig` 0.18, with their defaults."""

  def __init__(self, **given):
    none = "exclude_modules modules_to_save layers_to_transform eva_config target_parameters"
    off = dict.fromkeys(none.split())
    off |= dict(bias="none", lora_dropout=0.0, use_dora=False, rank_pattern={}, lora_bias=False)
    on = dict(init_lora_weights=True, peft_type="LORA", task_type="CAUSAL_LM", runtime_config=self)
    vars(self).update(
      {"r": 8, "lora_alpha": 8, "target_modules": None, "use_rslora": False, **off, **on, **given}
    )


def test_adapters_and_tools_of_trl():
  def lora_of(**given):
    return from_trl({"max_steps": 1}, peft_config=LoraConfig(**given), say=None).lora

  found = lora_of()
  assert (found.rank, found.alpha, found.targets) == (8, 8.0, ("q_proj", "v_proj"))
  found = lora_of(r=16, lora_alpha=32, target_modules={"o_proj", "k_proj"}, use_rslora=True)
  assert (found.rank, found.rslora, found.targets) == (16, True, ("k_proj", "o_proj"))
  assert len(lora_of(target_modules="all-linear").targets) == 7
  for given, error in (
    (dict(lora_dropout=0.05), "lora_dropout=0.05, which adapters do not have here"),
    (dict(use_dora=True), "use_dora=True"),
    (dict(init_lora_weights="pissa"), "init_lora_weights='pissa'"),
    (dict(init_lora_weights=False), "init_lora_weights=False"),
    (dict(target_modules=".*proj"), "target_modules='.*proj': give a list of names"),
  ):
    with pytest.raises(grpo_jax.ConfigError, match=error):
      lora_of(**given)
  for given, error in (
    (5, "peft_config is 5: give a peft.LoraConfig, or a dict of its fields"),
    ({"lora_alpha": None}, "config key lora.alpha has no value yet"),
    ({"target_modules": 5}, "target_modules=5: give a list of names"),
    ({"target_modules": [5]}, r"target_modules=\[5\]: give a list of names"),
  ):
    with pytest.raises(grpo_jax.ConfigError, match=error):
      from_trl({"max_steps": 1}, peft_config=given, say=None)

  def weather(city: str) -> str:
    """Says the weather.

    Args:
      city: Where.
    """
    return city

  config = from_trl({"max_steps": 1}, tools=[weather, "calculator"], say=None)
  assert config.environment.tools == ("weather", "calculator")


def test_rows_of_trl_need_no_file(tmp_path):
  rows = [
    {"prompt": [{"role": "user", "content": f"{n}+1="}], "answer": str(n + 1)} for n in (1, 2)
  ]
  config = from_trl({"num_train_epochs": 8}, train_dataset=rows, eval_dataset=rows[:1], say=None)
  task = make_task(config.data)
  assert [*task.train] == rows and [*task.test] == rows[:1]
  assert config.data.chat and config.data.task == "columns" and config.steps == 16
  assert (
    config.data.path
    == from_trl(None, train_dataset=rows, eval_dataset=rows[:1], say=None).data.path
  )
  (tmp_path / "a.jsonl").write_text('{"prompt": "1"}\n{"prompt": "2"}\n')
  (tmp_path / "b.jsonl").write_text('{"prompt": "3"}\n')
  files = dict(train_dataset=f"{tmp_path}/a.jsonl", eval_dataset=f"{tmp_path}/b.jsonl")
  task = make_task(from_trl({"max_steps": 1}, **files, say=None).data)
  assert [row["prompt"] for row in (*task.train, *task.test)] == ["1", "2", "3"]
  (tmp_path / "both").mkdir()
  (tmp_path / "a.jsonl").rename(tmp_path / "both/train.jsonl")
  (tmp_path / "b.jsonl").rename(tmp_path / "both/test.jsonl")
  (tmp_path / "both/no_test").mkdir()
  (tmp_path / "both/no_test/train.jsonl").write_text('{"prompt": "1"}\n')
  for wrong, message in (
    ("", "no test split"),
    ("no_test", "no test split"),
    ("no", "cannot read"),
  ):
    wrong = f"{tmp_path}/both/{wrong}" if wrong else ""
    with pytest.raises(ConfigError, match=message):
      from_trl({"max_steps": 1}, train_dataset=f"{tmp_path}/both", eval_dataset=wrong, say=None)
  folder = dict(train_dataset=f"{tmp_path}/both", eval_dataset=f"{tmp_path}/both")
  task = make_task(from_trl({"max_steps": 1}, **folder, say=None).data)
  assert [row["prompt"] for row in (*task.train, *task.test)] == ["1", "2", "3"]
