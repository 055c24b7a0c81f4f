"""Whole runs with adapters: on eight devices, resumed and exported, and what is refused."""

import dataclasses
from pathlib import Path

from gsm8k_test import finish, start
import jax
import numpy as np
from parallel_run_test import ONE, assert_same_numbers, make_run, train_steps
import pytest

from configs import arithmetic
from grpo_jax import model
from grpo_jax.config import from_dict
from grpo_jax.data.tasks import tasks
from grpo_jax.data.tokenizers import tokenizer
from grpo_jax.recipes import with_absolute_paths
from grpo_jax.run.checks import check_config
from grpo_jax.run.run import Run
from grpo_jax.settings import ConfigError
from grpo_jax.storage.reading import read_metrics
from grpo_jax.training.loop import run_steps


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
  model.save(folder, shape, jax.jit(model.init, static_argnums=1)(jax.random.key(7), shape))
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
    algo=dict(kl_coef=0.1),
  )
  run = make_run((2, 2, 2), sampling=dict(tensor=4), **sections)
  assert_same_numbers(train_steps(run), train_steps(make_run(ONE, **sections)), rel=1e-4)
  kernel = run.parameters.base["layers_0"]["mlp"]["gate"]["kernel"].qvalue
  assert kernel.dtype == "int8" and kernel.addressable_shards[0].data.shape == (2, 16, 48)


def config(checkpoint, **changes):
  c = arithmetic.get_config()
  c.model.path = checkpoint
  c.lora.update(rank=2, base_dtype="float32", targets=("q_proj", "down_proj"))
  c.batch.update(prompts=8, group_size=4)
  c.sampling.max_tokens, c.steps, c.warm_start.steps = 8, 3, 0
  c.optimizer.update(schedule="constant", warmup_steps=0, learning_rate=0.05)
  c.eval.update(every=0)
  c.checkpoint.every = 1
  c.log.update(completions_every=0, tensorboard=False)
  c.mesh.update(data=2, fsdp=4)
  c.update(changes)
  return from_dict(c.to_dict())


REWARD = """
def digits(completions, **_):
  return [sum(c.isdigit() for c in text) / 8 for text in completions]
"""


def rows_of(workdir):
  return [
    {key: value for key, value in row.items() if not key.startswith(("time/", "perf/", "rollout/"))}
    for row in read_metrics(workdir)
  ]


def train_twice(folder, checkpoint, **changes):
  """Trains without a stop in `whole`, and with one after the first step in `resumed`.

  Returns the states at the end.
  """
  (folder / "reward.py").write_text(REWARD)
  changes["reward"] = dict(functions=(f"{folder}/reward.py:digits",), weights=(1.0,))
  run_steps(config(checkpoint, steps=1, **changes), folder / "resumed")
  runs = [run_steps(config(checkpoint, **changes), folder / name) for name in ("whole", "resumed")]
  return [run.state for run in runs]


@pytest.fixture(scope="module")
def trained(checkpoint, tmp_path_factory):
  """The folder of `train_twice`, and what it returns."""
  folder = tmp_path_factory.mktemp("runs")
  return folder, train_twice(folder, checkpoint)


@pytest.mark.slow
def test_a_resumed_run_ends_as_the_one_that_was_not_stopped(trained):
  folder, (whole, resumed) = trained
  jax.tree.map(np.testing.assert_array_equal, whole, resumed)
  assert rows_of(folder / "whole") == rows_of(folder / "resumed")
  down = whole.train.params["layers_0"]["mlp"]["down"]
  assert any(np.abs(x).max() > 0 for x in jax.tree.leaves(down["lora_b"]))
  rows = rows_of(folder / "whole")
  assert [row["step"] for row in rows] == [1, 2, 3]
  # The reference is the base, and stays where it was.
  assert abs(rows[0]["kl"]) < 1e-6 < 1e-4 < rows[2]["kl"]
  assert whole.reference is None and not (folder / "whole" / "reference").exists()
  # The adapters and their moments are saved, but not the base.
  files = (folder / "whole" / "checkpoints" / "3").rglob("*")
  assert sum(file.stat().st_size for file in files if file.is_file()) < 200_000


@pytest.mark.slow
def test_a_reference_of_adapters_moves_and_is_resumed(checkpoint, tmp_path):
  """After the second of three steps it becomes the policy, so the KL of the third step is 0."""
  algo = dict(kl_coef=0.1, ref_sync_steps=2, ref_mixup=1.0)
  whole, resumed = train_twice(tmp_path, checkpoint, algo=algo)
  jax.tree.map(np.testing.assert_array_equal, whole, resumed)
  rows = rows_of(tmp_path / "whole")
  assert rows == rows_of(tmp_path / "resumed")
  first, second, third = (row["kl"] for row in rows)
  assert abs(first) < 1e-6 and second > 1e-5 and abs(third) < 1e-6
  assert whole.reference.keys() == whole.train.params.keys()
  assert any(np.abs(x).max() > 0 for x in jax.tree.leaves(whole.reference["layers_0"]["mlp"]))


@pytest.mark.slow
def test_export_of_adapters_and_of_the_merged_model(trained, checkpoint, tmp_path):
  workdir, (whole, _) = trained[0] / "whole", trained[1]
  exports = [
    start("export", f"--workdir={workdir}", f"--out={tmp_path / 'adapter'}", "--adapter"),
    start("export", f"--workdir={workdir}", f"--out={tmp_path / 'merged'}"),
  ]
  printed = [finish(process) for process in exports]
  assert "its adapters (float32)" in printed[0]
  assert "parameters, adapters merged," in printed[1]
  shape, base = model.load(checkpoint)
  shape = dataclasses.replace(shape, lora=model.load_adapter_shape(tmp_path / "adapter"))
  adapters = model.load_adapters(tmp_path / "adapter", shape)
  jax.tree.map(np.testing.assert_array_equal, adapters, whole.train.params)
  merged_shape, merged = model.load(tmp_path / "merged")
  tokens = np.arange(10)[None]
  joined_logits, merged_logits, base_logits = (
    model.forward(params, shape_of_params, tokens, tokens)[0]
    for params, shape_of_params in (
      (model.join(base, adapters), shape),
      (merged, merged_shape),
      (base, shape),
    )
  )
  np.testing.assert_allclose(joined_logits, merged_logits, atol=1e-5)
  assert np.abs(joined_logits - base_logits).max() > 1e-3


@pytest.mark.slow
def test_a_mixture_is_not_quantised(tmp_path):
  model.save(
    tmp_path / "hf", *model.load(Path(__file__).parent / "golden" / "families" / "qwen3_moe")
  )
  tokenizer.characters(tasks.ALPHABET).save(tmp_path / "hf")
  lora = dict(rank=2, targets=("q_proj",), base_dtype="int8")
  with pytest.raises(ConfigError, match="config key lora.base_dtype is 'int8': experts"):
    Run(config(str(tmp_path / "hf"), lora=lora))
  with pytest.raises(ConfigError, match="config key sampling.weights_dtype is 'int8': experts"):
    Run(config(str(tmp_path / "hf"), sampling=dict(weights_dtype="int8")))


def test_saved_paths_are_absolute(tmp_path, monkeypatch):
  """A run can then be used from another folder."""
  (tmp_path / "adapters" / "mine").mkdir(parents=True)
  monkeypatch.chdir(tmp_path)
  c = arithmetic.get_config()
  c.lora.path = c.data.tokenizer = c.model.path = "adapters/mine"
  c.reward.functions = ("strict", "adapters/mine", "adapters/mine:f")
  found = with_absolute_paths(from_dict(c.to_dict()))
  absolute = str(tmp_path / "adapters" / "mine")
  assert found.lora.path == found.data.tokenizer == found.model.path == absolute
  assert found.reward.functions == ("strict", absolute, f"{absolute}:f")


@pytest.mark.slow
def test_training_continues_from_a_folder_of_adapters(checkpoint, tmp_path):
  c = config(checkpoint)
  run = Run(c)
  saved = jax.tree.map(lambda x: jax.device_get(x) + 0.1, run.initial_params())
  model.save_adapters(tmp_path / "adapter", run.parameters.model, saved, checkpoint)

  def with_lora(**changes):
    changes["path"] = str(tmp_path / "adapter")
    return dataclasses.replace(c, lora=dataclasses.replace(c.lora, **changes))

  initial = jax.device_get(Run(with_lora()).initial_params())
  jax.tree.map(np.testing.assert_array_equal, initial, saved)
  words = r"config key lora.alpha is 5.0: the adapters of .* have 32.0, set it to that"
  with pytest.raises(ConfigError, match=words):
    Run(with_lora(alpha=5.0))


@pytest.mark.slow
def test_a_run_goes_on_from_its_own_adapters_of_joined_projections(tmp_path):
  """Qwen3.5's in_proj_qkv, on a base in int8 and a mesh of 2 x 2 x 2."""
  shape, base = model.load(Path(__file__).parent / "golden" / "families" / "qwen3_5")
  model.save(tmp_path / "hf", shape, base)
  tokenizer.characters(tasks.ALPHABET).save(tmp_path / "hf")
  lora = dict(rank=2, targets=("in_proj_qkv", "in_proj_b", "out_proj"), base_dtype="int8")
  c = config(str(tmp_path / "hf"), lora=lora, steps=2, sampling=dict(weights_dtype="int8"))
  c = dataclasses.replace(c, mesh=dataclasses.replace(c.mesh, data=2, fsdp=2, tensor=2))
  saved = jax.device_get(run_steps(c, tmp_path / "run").state.train.params)
  delta = saved["layers_0"]["delta"]
  assert sorted(delta) == ["in_proj_b", "in_proj_k", "in_proj_q", "in_proj_v", "out"]
  assert all(np.abs(x["lora_b"]).max() > 0 for x in delta.values())
  assert all(row["sampler/logprob_gap_max"] < 1e-3 for row in rows_of(tmp_path / "run"))
  parameters = Run(c).parameters
  kernel = parameters.base["layers_0"]["delta"]["in_proj_v"]["kernel"]
  assert kernel.qvalue.dtype == "int8"
  model.save_adapters(tmp_path / "adapter", parameters.model, saved, c.model.path)
  c = dataclasses.replace(c, lora=dataclasses.replace(c.lora, path=str(tmp_path / "adapter")))
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(Run(c).initial_params()), saved)
  words = r"lora.targets is \('in_proj_qkv',\): .* have \('in_proj_b', 'in_proj_qkv', 'out_proj'\)"
  with pytest.raises(ConfigError, match=words):
    Run(dataclasses.replace(c, lora=dataclasses.replace(c.lora, targets=("in_proj_qkv",))))


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
def test_what_cannot_be_run_is_refused(checkpoint, section, changes, words):
  c = config(checkpoint)
  with pytest.raises(ConfigError, match=words):
    check_config(
      dataclasses.replace(c, **{section: dataclasses.replace(getattr(c, section), **changes)})
    )
