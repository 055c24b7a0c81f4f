"""Runs whose prompts have images: a folder in, GRPO steps, a folder out."""

import dataclasses
import json
from pathlib import Path
import re

from flax.traverse_util import flatten_dict
import jax
import numpy as np
from PIL import Image
import pytest
from resume_test import Life
from small_run import grpo_step, small_run, with_reward, with_section
from small_vision import FAMILIES, vision_config

from grpo_jax import model
from grpo_jax.around.reporting.completions import shares, shown_completions
from grpo_jax.around.reporting.runs import read_run
from grpo_jax.config import Mesh
from grpo_jax.data import loader
from grpo_jax.evaluation.policy import load_policy
from grpo_jax.run import memory
from grpo_jax.run.run import Run
from grpo_jax.run.stages import programs
from grpo_jax.sampler.sampling import shared_tokens
from grpo_jax.settings import ConfigError
from grpo_jax.storage.reading import read_completions, read_metrics
from grpo_jax.training.loop import run_steps
from grpo_jax.types import Images


def take_steps(config, folder, count=2, make=small_run):
  """(run, state, metrics of each step) after so many steps."""
  run = make(config)
  step, store, _ = grpo_step(run, folder / "run")
  state, _, _ = store.restore_or_init()
  measured = []
  for index in range(count):
    state, metrics, _, _ = step(state, index)
    measured.append(metrics)
  return run, state, measured


KINDS = [(family, how) for family in FAMILIES for how in ("frozen", "trained")]
# No update changes them: the ranges and the scales of Gemma 4.
CONSTANTS = re.compile(r"/(clip_\w+|token_bias|token_scale|layer_scale)$")


@pytest.mark.slow
@pytest.mark.parametrize("family, vision", KINDS)
def test_a_folder_in_two_steps_a_folder_out(family, vision, tmp_path):
  config = vision_config(tmp_path, vision, family)
  run, state, measured = take_steps(config, tmp_path)
  for metrics in measured:
    print(f"largest gap {metrics['sampler/logprob_gap_max']:.1e}")
    assert metrics["sampler/logprob_gap_max"] < 1e-4 and metrics["grad_norm"] > 0
  shape, before = model.load(tmp_path / "model", vision=True)
  learned = jax.device_get(run.parameters.policy(state.train.params))
  model.save(tmp_path / "out", shape, learned)
  found, after = model.load(tmp_path / "out", vision=True)
  assert found == shape
  jax.tree.map(np.testing.assert_array_equal, after, learned)
  before, after = flatten_dict(before, sep="/"), flatten_dict(after, sep="/")
  still = {name for name, x in before.items() if (x == after[name]).all()}
  constants = {name for name in before if CONSTANTS.search(name)}
  tower = {name for name in before if name.startswith("vision/")}
  assert tower and still == constants | (tower if vision == "frozen" else set())


SEES = """
def reward(completions, images, answer, **columns):
  assert len(images) == len(completions)
  for row, (pictures, number) in enumerate(zip(images, answer)):
    assert len(pictures) == (1, 0, 3)[int(number) % 3]
    for picture in pictures:
      assert picture.mode == "RGB" and picture.getpixel((0, 0))
      picture.putpixel((0, 0), (0, 0, 0))  # its own copy
  return [float(len(set(text))) for text in completions]
"""


@pytest.mark.slow
def test_a_run_with_images_from_rewards_to_the_page(tmp_path):
  """Workers get images of Pillow, completions/ says where they are from, and a policy sees them."""
  config = with_reward(vision_config(tmp_path), tmp_path, SEES)
  config = with_section(config, "reward", workers=1)
  workdir = tmp_path / "run"
  run_steps(config.replace({"mesh.data": -1, "mesh.tensor": 1, "batch.prompts": 8}), workdir)
  rows = read_completions(workdir, 1)
  counts = {len(row.get("images", ())) for row in rows}
  assert counts == {0, 1, 3}
  sources = {one["source"] for row in rows for one in row.get("images", ())}
  assert all(Path(source).parent == tmp_path for source in sources)
  groups = shown_completions(read_run(str(workdir)), shares(1))["steps"][0]["groups"]
  thumbnails = [one["thumbnail"] for group in groups for one in group["images"]]
  assert thumbnails and all(url.startswith("data:image/jpeg;base64,") for url in thumbnails)

  policy = load_policy(workdir)
  seen = [Image.new("RGB", (20, 20), color) for color in ("black", "white")]
  logprobs = [
    policy.sample("What is it?", n=1, max_tokens=4, temperature=0, images=[image])[0].logprob
    for image in seen
  ]
  assert logprobs[0] != logprobs[1]
  with pytest.raises(ConfigError, match="there is no file 'none.png'"):
    policy.sample("What is it?", images=["none.png"])
  policy.export(tmp_path / "out")
  again = load_policy(config.replace({"model.path": str(tmp_path / "out")}))
  [same] = again.sample("What is it?", n=1, max_tokens=4, temperature=0, images=seen[1:])
  assert abs(same.logprob - logprobs[1]) < 1e-4


def close(first, second, bound):
  """Whether two trees of parameters are the same up to the bound."""
  pairs = zip(jax.tree.leaves(jax.device_get(first)), jax.tree.leaves(jax.device_get(second)))
  return all(np.abs(x - y).max() <= bound for x, y in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("vision", ["frozen", "trained"])
def test_micro_batches_do_not_change_the_update(vision, tmp_path):
  """SGD, because Adam makes steps of the same size of gradients that are rounding errors."""
  config = vision_config(tmp_path, vision)
  config = with_section(config, "optimizer", name="sgd", learning_rate=0.1)
  states = []
  for size in (4, 1):
    config = with_section(config, "batch", micro_batch=size)
    states.append(take_steps(config, tmp_path / str(size), count=1)[1].train.params)
  assert close(*states, bound=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("vision", ["frozen", "trained"])
@pytest.mark.parametrize(
  "mesh, slot_shards",
  [
    (Mesh(data=2, fsdp=2), 1),
    (Mesh(data=1, fsdp=2, tensor=2), 1),
    (Mesh(data=1, fsdp=2, context=2), 1),
    (Mesh(data=1, fsdp=2, context=2), 2),  # whose sampler also splits prompts
  ],
)
def test_a_step_on_a_mesh_is_that_of_one_device(mesh, slot_shards, vision, tmp_path):
  config = vision_config(tmp_path, vision)
  config = with_section(config, "optimizer", name="sgd", learning_rate=0.1)
  _, one, _ = take_steps(config, tmp_path / "one", count=1)
  axes = "data", "fsdp", "tensor", "context"
  config = config.replace({f"mesh.{axis}": getattr(mesh, axis) for axis in axes})
  config = with_section(config, "sampling", context=slot_shards)
  make = lambda config: Run(config, devices=jax.devices()[:4])  # noqa: E731
  _, four, [metrics] = take_steps(config, tmp_path / "four", count=1, make=make)
  assert metrics["sampler/logprob_gap_max"] < 1e-4
  assert close(one.train.params, four.train.params, bound=1e-4)


def with_adapters(config):
  """The config with adapters in the decoder, and in a tower that is trained."""
  of_tower = ("qkv", "linear_fc1") if config.model.vision == "trained" else ()
  targets = ("q_proj", "up_proj", *of_tower)
  return with_section(config, "lora", rank=2, base_dtype="float32", targets=targets)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("vision", ["frozen", "trained"])
def test_a_run_that_resumes_ends_with_the_same_bits(vision, lora, tmp_path):
  config = vision_config(tmp_path, vision, ref_sync_steps=1, ref_mixup=1.0 if lora else 0.6)
  config = with_adapters(config) if lora else config
  _, whole, _ = take_steps(config, tmp_path / "whole")
  run = small_run(config)
  step, store, checkpoints = grpo_step(run, tmp_path / "run")
  state, _, _ = store.restore_or_init()
  store.save(1, step(state, 0)[0])
  checkpoints.wait()
  step, store, _ = grpo_step(small_run(config), tmp_path / "run")
  state, done, restored = store.restore_or_init()
  assert restored and done == 1
  state, *_ = step(state, 1)
  for name in ("train", "reference"):
    pair = (jax.device_get(getattr(x, name)) for x in (whole, state))
    jax.tree.map(np.testing.assert_array_equal, *pair)


@pytest.mark.slow
@pytest.mark.parametrize("vision", ["frozen", "trained"])
def test_adapters_are_trained_and_what_is_under_them_is_not(vision, tmp_path):
  config = with_adapters(vision_config(tmp_path, vision))
  run, state, measured = take_steps(config, tmp_path)
  # The reference is the base, whose tower has no adapters.
  assert abs(measured[0]["kl"]) < 1e-6 < 1e-4 < measured[1]["kl"]
  assert all(metrics["sampler/logprob_gap_max"] < 1e-4 for metrics in measured)
  trained = jax.device_get(state.train.params)
  factors = flatten_dict(trained, sep="/")
  assert all(x.any() for x in factors.values())  # B begins with zeros
  assert any(name.startswith("vision/") for name in factors) == (vision == "trained")

  _, before = model.load(tmp_path / "model", vision=True)
  shape = run.parameters.model
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(run.parameters.base), before)
  model.save(tmp_path / "out", shape, run.parameters.policy(state.train.params))
  _, after = model.load(tmp_path / "out", vision=True)
  before, after = flatten_dict(before, sep="/"), flatten_dict(after, sep="/")
  changed = {name for name, x in before.items() if (x != after[name]).any()}
  assert changed == {name.replace("lora_a", "kernel") for name in factors if "lora_a" in name}

  model.save_adapters(tmp_path / "peft", shape, trained, base=str(tmp_path / "model"))
  config = with_section(config, "lora", path=str(tmp_path / "peft"))
  again = small_run(config).initial_params()
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(again), trained)


@pytest.mark.slow
@pytest.mark.parametrize(
  "family, words",
  [
    ("qwen3_vl", "add one of linear_fc1, linear_fc2, proj, qkv"),
    ("gemma4", "it can have none"),
  ],
)
def test_a_tower_that_is_trained_with_lora_has_adapters(family, words, tmp_path):
  config = vision_config(tmp_path, "trained", family)
  config = with_section(config, "lora", rank=2, targets=("q_proj",))
  with pytest.raises(ConfigError, match=f"{words}, or set model.vision=frozen"):
    small_run(config)


@pytest.mark.slow
def test_a_processor_whose_patches_do_not_fit_the_tower_is_refused(tmp_path):
  config = vision_config(tmp_path)
  file = tmp_path / "model" / "processor_config.json"
  processor = json.loads(file.read_text())
  processor["image_processor"]["patch_size"] *= 2
  file.write_text(json.dumps(processor))
  with pytest.raises(ConfigError, match="makes patches of .* numbers, and the vision tower takes"):
    _ = small_run(config).processor


@pytest.fixture
def encoded(monkeypatch):
  """Of each time that a program calls the vision tower, how many prompts it encodes."""
  counts, encode = [], model.encode

  def counting(params, config, images, remat=""):
    jax.debug.callback(counts.append, len(images.seen_PS2))
    return encode(params, config, images, remat)

  monkeypatch.setattr(model, "encode", counting)
  return counts


@pytest.mark.slow
@pytest.mark.parametrize(
  "vision, ahead, sampler, batches",
  [
    ("frozen", 0, 0, 2),
    ("frozen", 1, 0, 2),
    ("frozen", 1, 4, 4),  # on devices of its own, the sampler has its own tower
    ("trained", 0, 0, 2 * (1 + 1 + 2)),  # sampler, reference and two updates
  ],
)
def test_a_frozen_tower_encodes_each_batch_once(vision, ahead, sampler, batches, encoded, tmp_path):
  """In two steps of two updates each, beside a reference, and of one program for each shard."""
  config = vision_config(tmp_path, vision, updates_per_batch=2, old_logprobs="sampler")
  config = dataclasses.replace(config, steps=2)
  config = with_section(config, "rollout", max_staleness=ahead)
  config = with_section(config, "mesh", data=4, fsdp=1, tensor=1 if sampler else 2, sampler=sampler)
  run_steps(with_section(config, "eval", every=0), tmp_path / "run")
  jax.effects_barrier()
  of_own_weights = read_metrics(tmp_path / "run")[: 1 if ahead else 2]
  assert all(row["sampler/logprob_gap_max"] < 1e-4 for row in of_own_weights)
  assert sum(encoded) == batches * config.batch.prompts


@pytest.mark.slow
@pytest.mark.parametrize("vision", ["frozen", "trained"])
@pytest.mark.parametrize("sampler", [0, 4])
@pytest.mark.parametrize("dynamic", [False, True])
def test_images_with_batches_that_are_drawn_ahead(sampler, dynamic, vision, tmp_path):
  """Stops and goes on, with groups that wait in checkpoints."""
  config = vision_config(tmp_path, vision, dynamic_sampling=dynamic, kl_coef=0.0)
  config = dataclasses.replace(config, steps=4)
  config = with_section(config, "rollout", max_staleness=0 if dynamic else 2)
  config = with_section(config, "mesh", data=4, fsdp=1, tensor=1 if sampler else 2, sampler=sampler)
  whole = run_steps(config, tmp_path / "whole").state
  for stop in (1, 3, None):
    stopped = run_steps(config, tmp_path / "stopped", lambda step: step.step == stop)  # noqa: B023
  assert jax.tree.all(jax.tree.map(np.array_equal, whole.train.params, stopped.state.train.params))


@pytest.mark.slow
@pytest.mark.parametrize("vision", ["frozen", "trained"])
def test_a_plan_samples_what_a_frozen_tower_has_encoded(vision, tmp_path):
  """Which programs take pixels. Patches alone have so many numbers on their last axis."""
  run = small_run(with_section(vision_config(tmp_path, vision), "eval", every=1))
  takes_pixels = {}
  for program in programs(run):
    arrays = jax.tree.leaves([stage.lower().args_info for stage in program.stages])
    numbers = run.processor.kind.patch_numbers
    takes_pixels[program.name] = any(x.shape[-1:] == (numbers,) for x in arrays)
  is_trained = vision == "trained"
  expected = dict(sample=is_trained, reference=is_trained, update=is_trained, evaluate=True)
  assert takes_pixels == expected | ({} if is_trained else {"encode": True})


@pytest.mark.slow
@pytest.mark.parametrize("vision", ["frozen", "trained"])
def test_a_micro_batch_is_chosen_by_the_images_that_were_counted(vision, tmp_path):
  run = small_run(vision_config(tmp_path, vision))
  assert run.programs.most_images is None
  prompts = run.prompts("train")
  most, shape = run.programs.most_images, run.parameters.model
  counted = memory.images_of(run.config, shape, len(prompts), most)
  seen = loader.prompt_batch(prompts, np.arange(len(prompts))).images
  assert counted.patches_PINC.shape == seen.patches_PINC.shape and most[0] == 3

  def needed(most):
    given = run.config, shape, run.parameters.abstract_policy
    held = memory.visual_bytes(*given, most)
    return held + memory.activation_bytes(*given, most)(1)

  tokens = run.config.data.max_prompt_tokens
  assert needed((1, tokens)) == needed(None)
  assert needed((0, 0)) < needed((1, 4)) < needed(most) < needed((8, tokens))


def test_prompts_share_no_token_of_an_image():
  """Tokens of images are equal where the images are not."""
  tokens_PS, lengths_P = np.zeros((2, 128), np.int32), np.array([128, 128])
  seen_PS2 = np.full((2, 128, 2), -1, np.int32)
  images = Images(patches_PINC=None, places_PIN2=None, seen_PS2=seen_PS2)
  assert shared_tokens(tokens_PS, lengths_P, images) == 96  # one token at least is left
  seen_PS2[1, 70:80] = 0
  assert shared_tokens(tokens_PS, lengths_P, images) == 64


@pytest.mark.slow
def test_a_process_that_is_killed_goes_on_to_the_same_bits(tmp_path):
  """Killed twice, wherever the step after these rows of metrics is then."""
  vision_config(tmp_path)
  keys = [
    *("warm_start.steps=0", "steps=4", "data.task=columns", "data.chat=True"),
    *("data.max_prompt_tokens=160", f"data.path={tmp_path}", f"model.path={tmp_path / 'model'}"),
  ]
  folders = []
  for name, moments in (("whole", ()), ("killed", (1, 3))):
    (tmp_path / name).mkdir()
    life = Life(tmp_path / name, keys)
    for rows in moments:
      life.kill(lambda folder, rows=rows: len(folder.rows()) >= rows)
    life.finish()
    folders.append(life.folder)
  whole, killed = folders
  assert killed.bits() == whole.bits() and killed.rows() == whole.rows()
  assert killed.completions() == whole.completions()
