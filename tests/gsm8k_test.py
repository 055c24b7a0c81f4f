"""configs/gsm8k.py from a Hugging Face folder to a Hugging Face folder, by the commands a user types."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers

from configs import gsm8k
from grpo_jax import model
from grpo_jax.config import from_dict
from grpo_jax.data import tasks, tokenizer
from grpo_jax.data.loader import Prompts
from grpo_jax.run.build import Run
from grpo_jax.run.checkpoint import Checkpoints
from grpo_jax.settings import ConfigError

ROOT = Path(__file__).parents[1]
GSM8K = Path(os.environ.get("GSM8K_DIR", ROOT.parent / "shared/data/gsm8k"))
needs_gsm8k = pytest.mark.skipif(
  not (GSM8K / "test.jsonl").is_file(), reason="no GSM8K text: set GSM8K_DIR"
)
VOCABULARY = 4096  # of the model; the tokenizer has at most as many ids
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
TEMPLATE = (
  "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + eos_token + '\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LENGTH = "def length(completions, **_):\n  return [len(text) for text in completions]\n"


def problems(count):
  for i in range(count):
    a, b = 2 + i % 7, 3 + i % 5
    yield {
      "question": f"Ann has {a} boxes of {b} pens and one pen more. How many pens does she have?",
      "answer": f"The boxes hold {a}*{b}=<<{a}*{b}={a * b}>>{a * b} pens.\nShe has {a * b + 1}.\n#### {a * b + 1}",
    }


@pytest.fixture(scope="module")
def text(tmp_path_factory):
  folder = tmp_path_factory.mktemp("text")
  for split, count in (("train", 24), ("test", 12)):
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(p) + "\n" for p in problems(count)))
  return folder


def write_tokenizer(folder, corpus):
  """Byte-level BPE, as Qwen's."""
  engine = tokenizers.Tokenizer(tokenizers.models.BPE())
  engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  engine.decoder = tokenizers.decoders.ByteLevel()
  engine.train_from_iterator(
    corpus,
    tokenizers.trainers.BpeTrainer(
      vocab_size=VOCABULARY,
      special_tokens=["<|endoftext|>", "<|im_end|>", "<|im_start|>"],
      show_progress=False,
      initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    ),
  )
  engine.save(str(folder / "tokenizer.json"))
  (folder / "tokenizer_config.json").write_text(
    json.dumps({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE})
  )


def make_checkpoint(folder, corpus):
  """A tiny random Qwen2 with a tokenizer for `corpus`."""
  shape = model.ModelConfig(
    VOCABULARY,
    embed_dim=16,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=32,
    rope_theta=1e6,
    max_positions=1024,
    stop_ids=(1, 0),
  )
  model.save(folder, shape, model.init(jax.random.key(7), shape))
  write_tokenizer(folder, corpus)
  return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
  return make_checkpoint(
    tmp_path_factory.mktemp("small") / "hf", [p["question"] + p["answer"] for p in problems(24)]
  )


def start(module, *flags):
  """A process of one device."""
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
  """-> the rows of metrics.jsonl. Rewards are lengths: a random model would never earn another one."""
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
  return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def read_config(checkpoint, text, **changes):
  values = gsm8k.get_config().to_dict()
  values["model"]["path"], values["data"]["path"] = str(checkpoint), str(text)
  return from_dict(values | changes)


def test_config_without_a_checkpoint_is_refused_in_one_line():
  with pytest.raises(ConfigError, match=r"^config key model\.path .*$"):
    from_dict(gsm8k.get_config().to_dict())


@pytest.fixture(scope="module")
def trained(tmp_path_factory, checkpoint, text):
  workdir = tmp_path_factory.mktemp("trained") / "run"
  return workdir, train(workdir, checkpoint, text)


def test_two_steps_with_evaluation_completions_and_checkpoints(trained, checkpoint, text):
  workdir, rows = trained
  assert [row["step"] for row in rows] == [0, 1, 2]
  assert [name in row for row in rows for name in ("loss", "eval/accuracy")] == [
    False,
    True,
    True,
    False,
    True,
    True,
  ]
  assert rows[1]["reward"] == rows[1]["rewards/length/mean"] > 0 and rows[1]["kl"] == pytest.approx(
    0, abs=1e-4
  )
  assert rows[1]["grad_norm"] > 0 and rows[1]["skipped_updates"] == 0
  shown = [
    json.loads(line) for line in (workdir / "completions" / "000001.jsonl").read_text().splitlines()
  ]
  questions = {p["question"] for p in problems(24)}
  begin, end = "<|im_start|>user\n", " Let's think"
  assert len(shown) == 8 and all(
    row["prompt"].removeprefix(begin).partition(end)[0] in questions for row in shown
  )
  assert Checkpoints(workdir / "checkpoints", 3).steps() == [1, 2]


def test_evaluate_sample_and_export(trained, checkpoint, text, tmp_path):
  workdir, rows = trained
  out, questions = tmp_path / "out" / "hf", ["--question=How many?", "--max_tokens=5", "--seed=3"]
  commands = [
    start("evaluate", f"--workdir={workdir}", "--samples=2"),
    start(
      "sample",
      "--config=configs/gsm8k.py",
      f"--config.model.path={checkpoint}",
      f"--config.data.path={text}",
      "--config.data.system=Think.",
      "--n=3",
      *questions,
    ),
    start("export", f"--workdir={workdir}", f"--out={out}"),
  ]
  evaluated, sampled, _ = map(finish, commands)

  assert f"{workdir}, step 2: 10 test problems of gsm8k\n" in evaluated
  assert f"greedy: {rows[2]['eval/mean_length']:.1f} tokens on average" in evaluated
  assert all(f"  eval/{name} " in evaluated for name in ("accuracy", "mean@2", "pass@2", "maj@2"))
  assert max(map(len, evaluated.splitlines()[1:])) <= 80

  prompt = gsm8k.get_config().data.prompt.format(question="How many?")
  length = len(
    tokenizer.load(checkpoint).encode(
      f"<|im_start|>system\nThink.<|im_end|>\n<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    )
  )
  assert sampled.startswith(f"{checkpoint}: prompt of {length} tokens, temperature 1\n")
  assert sampled.count("\n--- ") == 3

  run = Run(read_config(checkpoint, text))
  step, params = Checkpoints(workdir / "checkpoints", 3).restore_params(run.parameters.abstract)
  shape, exported = model.load(out)
  same = jax.tree.map(
    lambda a, b: np.array_equal(np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32)),
    params,
    exported,
  )
  moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), exported, model.load(checkpoint)[1])
  assert step == 2 and all(jax.tree.leaves(same)) and all(jax.tree.leaves(moved))
  assert shape == model.load_config(checkpoint)
  for name in ("tokenizer.json", "tokenizer_config.json"):
    assert (out / name).read_bytes() == (checkpoint / name).read_bytes()


@pytest.mark.slow
def test_the_recipe_with_adapters(checkpoint, text, tmp_path):
  rows = train(tmp_path / "run", checkpoint, text, "gsm8k_lora")
  assert (
    [row["step"] for row in rows] == [0, 1, 2]
    and rows[2]["grad_norm"] > 0
    and rows[2]["reward"] > 0
  )
  finish(start("export", f"--workdir={tmp_path / 'run'}", f"--out={tmp_path / 'out'}", "--adapter"))
  config = dataclasses.replace(
    model.load_config(checkpoint), lora=model.load_lora(tmp_path / "out")
  )
  adapters = model.load_adapters(tmp_path / "out", config)
  assert config.lora.rank == 64 and np.abs(adapters["layers_0"]["mlp"]["down"]["lora_b"]).max() > 0
  assert (tmp_path / "out" / "tokenizer_config.json").read_bytes() == (
    checkpoint / "tokenizer_config.json"
  ).read_bytes()


@pytest.mark.slow
def test_the_recipe_for_formulas(checkpoint, tmp_path):
  for split, count in (("train", 8), ("test", 10)):
    (tmp_path / f"{split}.jsonl").write_text(
      "".join(
        json.dumps({"problem": f"What is ${i} / 2$?", "answer": rf"\frac{{{i}}}{{2}}"}) + "\n"
        for i in range(count)
      )
    )
  rows = train(tmp_path / "run", checkpoint, tmp_path, "math")
  assert [row["step"] for row in rows] == [0, 1, 2] and rows[2]["eval/accuracy"] >= 0
  shown = (tmp_path / "run" / "completions" / "000001.jsonl").read_text()
  assert "<|im_start|>system\\nPlease reason step by step" in shown


@needs_gsm8k
def test_real_problems_train_and_fit(tmp_path):
  task = tasks.gsm8k(str(GSM8K))
  checkpoint = make_checkpoint(
    tmp_path / "hf", [e["question"] + e["solution"] for e in task.train[:2000]]
  )
  config = read_config(checkpoint, GSM8K).data
  test, few = (
    Prompts(examples, tokenizer.load(checkpoint), config)
    for examples in (task.test, task.train[:500])
  )
  assert len(test) == 1319 and few.dropped == 0
  rows = train(tmp_path / "run", checkpoint, GSM8K)
  assert [row["step"] for row in rows] == [0, 1, 2] and all(
    np.isfinite(rows[2][name]) for name in ("loss", "kl")
  )
  assert rows[2]["reward"] > 0 and rows[2]["eval/accuracy_high"] < 0.5
