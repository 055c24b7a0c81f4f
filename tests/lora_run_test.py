"""Whole runs with adapters: on eight devices, stopped and resumed, exported; what cannot be run is refused."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from gsm8k_test import finish, start
from parallel_run_test import ONE, make_run, one_step

from configs import arithmetic
from grpo_jax import model
from grpo_jax.config import from_dict
from grpo_jax.data import tasks, tokenizer
from grpo_jax.run import cli
from grpo_jax.run.build import Run
from grpo_jax.run.checks import check
from grpo_jax.settings import ConfigError
from grpo_jax.train import train


def make_checkpoint(folder):
  """Saves a random Qwen2 that reads sums. Returns its folder."""
  characters = tokenizer.characters(tasks.ALPHABET)
  shape = model.ModelConfig(
    vocab_size=characters.vocab_size,
    embed_dim=32,
    num_layers=2,
    num_heads=8,
    num_kv_heads=8,
    head_dim=4,
    mlp_dim=96,
    max_positions=64,
    stop_ids=(1,),
  )
  model.save(folder, shape, model.init(jax.random.key(7), shape))
  characters.save(folder)
  return str(folder)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
  return make_checkpoint(tmp_path_factory.mktemp("base") / "hf")


@pytest.mark.slow
def test_eight_devices_give_the_numbers_of_one(checkpoint):
  sections = dict(
    model=dict(path=checkpoint),
    lora=dict(rank=4, base_dtype="int8"),
    sampling=dict(layout="tensor"),
    algo=dict(kl_coef=0.1),
  )
  tokens, losses, gaps, params = one_step(make_run(ONE, **sections))
  run = make_run((2, 2, 2), **sections)
  ours = one_step(run)
  np.testing.assert_array_equal(ours[0], tokens)
  for mine, theirs in zip(ours[1], losses):
    for name in ("loss", "kl", "entropy", "grad_norm"):
      assert mine[name] == pytest.approx(theirs[name], abs=1e-5, rel=1e-4), name
  assert max(gaps + ours[2]) < 1e-4
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3), ours[3], params)
  kernel = run.parameters.base["layers_0"]["mlp"]["gate"]["kernel"].qvalue
  assert kernel.dtype == "int8" and kernel.addressable_shards[0].data.shape == (16, 48)


def config(checkpoint, **changes):
  c = arithmetic.get_config()
  c.model.path, c.lora.rank, c.lora.base_dtype, c.lora.targets = (
    checkpoint,
    2,
    "float32",
    ("q_proj", "down_proj"),
  )
  c.batch.update(prompts=8, group_size=4)
  c.sampling.max_tokens, c.steps, c.warm_start.steps = 8, 3, 0
  c.optimizer.update(schedule="constant", warmup_steps=0, learning_rate=0.05)
  c.eval.update(every=0)
  c.checkpoint.every, c.log.completions_every, c.log.tensorboard, c.mesh.data, c.mesh.fsdp = (
    1,
    0,
    False,
    2,
    4,
  )
  c.update(changes)
  return from_dict(c.to_dict())


REWARD = "def digits(completions, **_): return [sum(c.isdigit() for c in text) / 8 for text in completions]\n"


@pytest.fixture(scope="module")
def trained(checkpoint, tmp_path_factory):
  """(workdir of a run that was stopped and resumed, what it ended with; the same of one that was not stopped)."""
  folder = tmp_path_factory.mktemp("runs")
  (folder / "reward.py").write_text(REWARD)
  reward = dict(functions=(f"{folder}/reward.py:digits",), weights=(1.0,))
  states = []
  for name, steps in (("whole", (3,)), ("resumed", (1, 3))):
    for count in steps:
      state = train(config(checkpoint, steps=count, reward=reward), str(folder / name))
    states.append(jax.device_get(state))
  return folder, states


def test_a_resumed_run_ends_as_the_one_that_was_not_stopped(trained):
  folder, (whole, resumed) = trained
  jax.tree.map(np.testing.assert_array_equal, whole, resumed)
  assert any(
    np.abs(x).max() > 0 for x in jax.tree.leaves(whole.params["layers_0"]["mlp"]["down"]["lora_b"])
  )
  rows = [
    json.loads(line) for line in (folder / "whole" / "metrics.jsonl").read_text().splitlines()
  ]
  assert [row["step"] for row in rows] == [1, 2, 3]
  assert abs(rows[0]["kl"]) < 1e-6 < 1e-4 < rows[2]["kl"]  # the reference stays where it was
  saved = sum(
    file.stat().st_size
    for file in (folder / "whole" / "checkpoints" / "3").rglob("*")
    if file.is_file()
  )
  assert saved < 200_000  # the adapters and their moments, not the base
  assert not (folder / "whole" / "reference").exists()


def test_export_of_adapters_and_of_the_merged_model(trained, checkpoint, tmp_path):
  workdir, (whole, _) = trained[0] / "whole", trained[1]
  commands = [
    start("export", f"--workdir={workdir}", f"--out={tmp_path / 'adapter'}", "--adapter"),
    start("export", f"--workdir={workdir}", f"--out={tmp_path / 'merged'}"),
  ]
  said = [finish(process) for process in commands]
  assert "its adapters (float32)" in said[0] and "parameters, adapters merged," in said[1]
  asked = model.load_lora(tmp_path / "adapter")
  shape, base = model.load(checkpoint)
  shape = dataclasses.replace(shape, lora=asked)
  adapters = model.load_adapters(tmp_path / "adapter", shape)
  jax.tree.map(np.testing.assert_array_equal, adapters, whole.params)
  tokens = np.arange(10)[None]
  merged = model.load(tmp_path / "merged")
  logits = [
    model.forward(params, c, tokens, tokens)[0]
    for params, c in ((model.join(base, adapters), shape), merged[::-1], (base, shape))
  ]
  np.testing.assert_allclose(logits[0], logits[1], atol=1e-5)
  assert np.abs(logits[0] - logits[2]).max() > 1e-3


def test_a_mixture_is_not_quantised(tmp_path):
  model.save(
    tmp_path / "hf", *model.load(Path(__file__).parent / "golden" / "families" / "qwen3_moe")
  )
  tokenizer.characters(tasks.ALPHABET).save(tmp_path / "hf")
  c = config(str(tmp_path / "hf"))
  with pytest.raises(ConfigError, match="config key lora.base_dtype is 'int8': experts"):
    Run(
      dataclasses.replace(
        c, lora=dataclasses.replace(c.lora, targets=("q_proj",), base_dtype="int8")
      )
    )


def test_paths_are_whole_in_what_is_saved(tmp_path, monkeypatch):
  """So that a run can be used from another folder."""
  (tmp_path / "adapters" / "mine").mkdir(parents=True)
  monkeypatch.chdir(tmp_path)
  c = arithmetic.get_config()
  c.lora.path = c.data.tokenizer = c.model.path = "adapters/mine"
  c.reward.functions = ("strict", "adapters/mine", "adapters/mine:f")
  found, whole = cli._absolute(from_dict(c.to_dict())), str(tmp_path / "adapters" / "mine")
  assert found.lora.path == found.data.tokenizer == found.model.path == whole
  assert found.reward.functions == ("strict", whole, f"{whole}:f")


def test_training_goes_on_from_a_folder_of_adapters(trained, checkpoint, tmp_path):
  whole = trained[1][0]
  c = config(checkpoint)
  run = Run(c)
  model.save_adapters(tmp_path / "adapter", run.model, whole.params, checkpoint)
  again = dataclasses.replace(c, lora=dataclasses.replace(c.lora, path=str(tmp_path / "adapter")))
  jax.tree.map(
    np.testing.assert_array_equal, jax.device_get(Run(again).initial_params()), whole.params
  )
  other = dataclasses.replace(again, lora=dataclasses.replace(again.lora, alpha=5.0))
  with pytest.raises(
    ConfigError, match=r"config key lora.alpha is 5.0: the adapters of .* have 32.0, set it to that"
  ):
    Run(other)


@pytest.mark.parametrize(
  "section, changes, words",
  [
    ("lora", dict(rank=-1), "lora.rank is -1"),
    ("lora", dict(rank=0, path="x"), "lora.path is 'x': set lora.rank"),
    ("lora", dict(targets=()), "name at least one"),
    ("lora", dict(targets=("c_attn",)), "lora.targets is 'c_attn': choose"),
    ("lora", dict(base_dtype="fp4"), "lora.base_dtype is 'fp4': choose"),
    ("lora", dict(alpha=0.0), "lora.alpha is 0.0"),
    ("model", dict(path=""), "set model.path"),
    ("algo", dict(ref_sync_steps=1), "algo.ref_mixup is 0.6"),
    ("warm_start", dict(steps=1), "warm-start without adapters"),
  ],
)
def test_what_cannot_be_run_is_named(checkpoint, section, changes, words):
  c = config(checkpoint)
  with pytest.raises(ConfigError, match=words):
    check(dataclasses.replace(c, **{section: dataclasses.replace(getattr(c, section), **changes)}))
