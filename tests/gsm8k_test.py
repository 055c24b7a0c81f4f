"""configs/gsm8k.py with the commands of a user, from one Hugging Face folder to another."""

import dataclasses
import json
import os
from pathlib import Path
import subprocess
import sys

import jax
import numpy as np
import pytest

from configs import gsm8k
from grpo_jax import model
from grpo_jax.config import from_dict
from grpo_jax.data.prompts import PromptSet
from grpo_jax.data.tasks import tasks
from grpo_jax.data.tokenizers import tokenizer
from grpo_jax.run.run import Run
from grpo_jax.settings import ConfigError
from grpo_jax.storage.checkpoint import Checkpoints
from tests.small_qwen import make_checkpoint, problems

ROOT = Path(__file__).parents[1]
GSM8K = Path(os.environ.get("GSM8K_DIR", ROOT.parent / "shared/data/gsm8k"))
needs_gsm8k = pytest.mark.skipif(
  not (GSM8K / "test.jsonl").is_file(), reason="no GSM8K text: set GSM8K_DIR"
)
SMALL = [
  "--config.steps=2",
  "--config.batch.prompts=4",
  "--config.batch.group_size=2",
  "--config.batch.micro_batch=2",
  "--config.sampling.max_tokens=16",
  "--config.optimizer.learning_rate=1e-3",
  "--config.log.completions_every=1",
  "--config.eval.every=2",
  "--config.eval.examples=10",
  "--config.eval.batch=8",
  "--config.checkpoint.every=1",
]
LENGTH = "def length(completions, **columns):\n  return [len(text) for text in completions]\n"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
  folder = tmp_path_factory.mktemp("text")
  for split, count in (("train", 24), ("test", 12)):
    write_lines(folder / f"{split}.jsonl", problems(count))
  return folder


def write_lines(path, objects):
  path.write_text("".join(json.dumps(x) + "\n" for x in objects))


def read_lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
  return make_checkpoint(
    tmp_path_factory.mktemp("small") / "hf", [p["question"] + p["answer"] for p in problems(24)]
  )


def start(module, *flags):
  """Starts python -m grpo_jax.MODULE with one device."""
  environment = os.environ | {"JAX_NUM_CPU_DEVICES": "1", "COLUMNS": "80"}
  return subprocess.Popen(
    [sys.executable, "-m", f"grpo_jax.{module}", *flags],
    cwd=ROOT,
    env=environment,
    text=True,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )


def finish(process):
  out, err = process.communicate()
  assert process.returncode == 0, err
  return out


def train(workdir, checkpoint, text, name="gsm8k"):
  """Trains by the command line and returns the rows of metrics.jsonl.

  Rewards are lengths, because a random model would never earn another reward.
  """
  reward = workdir.parent / "length.py"
  reward.write_text(LENGTH)
  finish(
    start(
      "train",
      f"--config=configs/{name}.py",
      f"--config.model.path={checkpoint}",
      f"--config.data.path={text}",
      f"--workdir={workdir}",
      f"--config.reward.functions=('{reward}:length',)",
      *SMALL,
    )
  )
  return read_lines(workdir / "metrics.jsonl")


def gsm8k_config(checkpoint, text):
  values = gsm8k.get_config().to_dict()
  values["model"]["path"], values["data"]["path"] = str(checkpoint), str(text)
  return from_dict(values)


def test_the_config_needs_a_checkpoint():
  with pytest.raises(ConfigError, match=r"^config key model\.path has no value yet: .*$"):
    from_dict(gsm8k.get_config().to_dict())


@pytest.fixture(scope="module")
def trained(tmp_path_factory, checkpoint, text):
  workdir = tmp_path_factory.mktemp("trained") / "run"
  return workdir, train(workdir, checkpoint, text)


@pytest.mark.slow
def test_two_steps_with_evaluation_completions_and_checkpoints(trained, checkpoint, text):
  workdir, rows = trained
  assert [row["step"] for row in rows] == [0, 1, 2]
  assert ["loss" in row for row in rows] == [False, True, True]
  assert ["eval/accuracy" in row for row in rows] == [True, False, True]
  assert rows[1]["reward"] == rows[1]["rewards/length/mean"] > 0
  assert rows[1]["kl"] == pytest.approx(0, abs=1e-4)
  assert rows[1]["grad_norm"] > 0 and rows[1]["skipped_updates"] == 0
  completions = read_lines(workdir / "completions" / "000001.jsonl")
  questions = {p["question"] for p in problems(24)}
  begin, end = "<|im_start|>user\n", " Let's think"
  assert len(completions) == 8
  for row in completions:
    assert row["prompt"].removeprefix(begin).partition(end)[0] in questions
  assert Checkpoints(workdir / "checkpoints", keep=3).steps() == [1, 2]


@pytest.mark.slow
def test_evaluate_sample_and_export(trained, checkpoint, text, tmp_path):
  workdir, rows = trained
  out = tmp_path / "out" / "hf"
  commands = [
    start("evaluate", f"--workdir={workdir}", "--samples=2"),
    start(
      "sample",
      "--config=configs/gsm8k.py",
      f"--config.model.path={checkpoint}",
      f"--config.data.path={text}",
      "--config.data.system=Think.",
      "--question=How many?",
      "--n=3",
      "--max_tokens=5",
      "--seed=3",
    ),
    start("export", f"--workdir={workdir}", f"--out={out}"),
  ]
  evaluated, sampled, _ = map(finish, commands)

  assert f"{workdir}, step 2: 10 test problems of gsm8k\n" in evaluated
  assert f"greedy: {rows[2]['eval/mean_length']:.1f} tokens on average" in evaluated
  assert all(f"  eval/{name} " in evaluated for name in ("accuracy", "mean@2", "pass@2", "maj@2"))
  assert max(map(len, evaluated.splitlines()[1:])) <= 80

  user = gsm8k.get_config().data.prompt.format(question="How many?")
  messages = f"<|im_start|>system\nThink.<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n"
  length = len(tokenizer.load(checkpoint).encode(f"{messages}<|im_start|>assistant\n"))
  assert sampled.startswith(f"{checkpoint}: prompt of {length} tokens, temperature 1\n")
  assert sampled.count("\n--- ") == 3

  assert_exported(workdir, checkpoint, text, out)


def assert_exported(workdir, checkpoint, text, out):
  """`out` holds the newest checkpoint's parameters, bit by bit, and the tokenizer's files."""
  run = Run(gsm8k_config(checkpoint, text))
  checkpoints = Checkpoints(workdir / "checkpoints", keep=3)
  step, params = checkpoints.restore_params(run.parameters.abstract)
  shape, exported = model.load(out)

  def same_bits(a, b):
    return np.array_equal(np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32))

  def moved(a, b):
    return not np.array_equal(a, b)

  assert step == 2
  assert all(jax.tree.leaves(jax.tree.map(same_bits, params, exported)))
  assert all(jax.tree.leaves(jax.tree.map(moved, exported, model.load(checkpoint)[1])))
  assert shape == model.load_model_config(checkpoint)
  for name in ("tokenizer.json", "tokenizer_config.json"):
    assert (out / name).read_bytes() == (checkpoint / name).read_bytes()


@pytest.mark.slow
def test_the_recipe_with_adapters(checkpoint, text, tmp_path):
  workdir, out = tmp_path / "run", tmp_path / "out"
  rows = train(workdir, checkpoint, text, "gsm8k_lora")
  assert [row["step"] for row in rows] == [0, 1, 2]
  assert rows[2]["grad_norm"] > 0 and rows[2]["reward"] > 0
  finish(start("export", f"--workdir={workdir}", f"--out={out}", "--adapter"))
  shape = dataclasses.replace(
    model.load_model_config(checkpoint), lora=model.load_adapter_shape(out)
  )
  adapters = model.load_adapters(out, shape)
  assert shape.lora.rank == 64
  assert np.abs(adapters["layers_0"]["mlp"]["down"]["lora_b"]).max() > 0
  name = "tokenizer_config.json"
  assert (out / name).read_bytes() == (checkpoint / name).read_bytes()


@pytest.mark.slow
def test_the_recipe_for_formulas(checkpoint, tmp_path):
  for split, count in (("train", 8), ("test", 10)):
    examples = [
      {"problem": f"What is ${i} / 2$?", "answer": rf"\frac{{{i}}}{{2}}"} for i in range(count)
    ]
    write_lines(tmp_path / f"{split}.jsonl", examples)
  rows = train(tmp_path / "run", checkpoint, tmp_path, "math")
  assert [row["step"] for row in rows] == [0, 1, 2] and rows[2]["eval/accuracy"] >= 0
  completions = (tmp_path / "run" / "completions" / "000001.jsonl").read_text()
  assert "<|im_start|>system\\nPlease reason step by step" in completions


@pytest.mark.slow
@needs_gsm8k
def test_real_problems_train_and_fit(tmp_path):
  task = tasks.gsm8k(str(GSM8K))
  corpus = [example["question"] + example["solution"] for example in task.train[:2000]]
  checkpoint = make_checkpoint(tmp_path / "hf", corpus)
  data, tokens = gsm8k_config(checkpoint, GSM8K).data, tokenizer.load(checkpoint)
  assert len(PromptSet(task.test, tokens, data)) == 1319
  assert PromptSet(task.train[:500], tokens, data).dropped == 0
  rows = train(tmp_path / "run", checkpoint, GSM8K)
  assert [row["step"] for row in rows] == [0, 1, 2]
  assert np.isfinite(rows[2]["loss"]) and np.isfinite(rows[2]["kl"])
  assert rows[2]["reward"] > 0 and rows[2]["eval/accuracy_high"] < 0.5
