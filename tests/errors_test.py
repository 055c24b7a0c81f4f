"""Bad input ends in one line that names the key or file, exit code 2, and no file overwritten."""

import contextlib
import json
import os
from pathlib import Path
import subprocess
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_qwen import make_checkpoint, problems

from configs import arithmetic
from grpo_jax import model
from grpo_jax.config import from_dict, to_dict
from grpo_jax.console.stop import leaving_on_second_signal
from grpo_jax.data.tasks.arithmetic import ALPHABET
from grpo_jax.data.tokenizers import tokenizer
from grpo_jax.run.run import Run
from grpo_jax.settings import ConfigError
from grpo_jax.storage.reading import read_config
from grpo_jax.train import train
from grpo_jax.training.loop import Trainer

ROOT = Path(__file__).parents[1]


def config(**changes):
  """configs/arithmetic.py with changes by key, with __ for the dot."""
  values = arithmetic.get_config().to_dict()
  # The messages below name these numbers.
  values["batch"].update(prompts=32, group_size=8, micro_batch=0)
  values["optimizer"].update(learning_rate=3e-4, schedule="constant")
  for key, value in changes.items():
    section, _, last = key.rpartition("__")
    (values[section] if section else values)[last] = value
  return from_dict(values)


def contents(folder):
  return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# Values, in this process.


@pytest.mark.parametrize(
  "changes, words",
  [
    (dict(batch__group_size=1), ["batch.group_size is 1", "at least 2"]),
    (
      dict(batch__prompts=12),
      ["batch.prompts is 12", "multiple of mesh.data x mesh.fsdp x mesh.expert = 8"],
    ),
    (dict(batch__micro_batch=5), ["batch.micro_batch is 5", "must divide batch.prompts = 32"]),
    (
      dict(batch__micro_batch=4),
      ["batch.micro_batch is 4", "multiple of mesh.data x mesh.fsdp x mesh.expert = 8"],
    ),
    (dict(warm_start__batch=12), ["warm_start.batch is 12", "multiple of"]),
    (dict(eval__batch=12), ["eval.batch is 12", "multiple of"]),
    (dict(mesh__data=3), ["mesh.data=3", "8 devices", "choose axes whose product is 8"]),
    (dict(mesh__data=2, mesh__fsdp=2), ["mesh.fsdp=2", "8 devices"]),
    (dict(mesh__data=-1, mesh__fsdp=-1), ["mesh.fsdp=-1", "one of them may be -1"]),
    (dict(steps=-1), ["steps is -1", "at least 0"]),
    (dict(checkpoint__keep=0), ["checkpoint.keep is 0", "at least 1"]),
    (dict(log__every=0), ["log.every is 0", "at least 1"]),
    (dict(sampling__temperature=0.0), ["sampling.temperature is 0.0", "above 0"]),
    (dict(sampling__temperature=float("nan")), ["sampling.temperature is nan", "above 0"]),
    (dict(sampling__top_p=0.0), ["sampling.top_p is 0.0", "(0, 1]"]),
    (dict(sampling__top_p=1.5), ["sampling.top_p is 1.5", "(0, 1]"]),
    (dict(sampling__min_p=1.0), ["sampling.min_p is 1.0", "[0, 1)"]),
    (dict(sampling__top_k=-1), ["sampling.top_k is -1", "at least 0"]),
    (
      dict(sampling__min_tokens=65),
      ["sampling.min_tokens is 65", "sampling.max_tokens is", "no completion could end"],
    ),
    (dict(sampling__tensor=-1), ["sampling.tensor is -1", "at least 0"]),
    (dict(sampling__tensor=3), ["sampling.tensor is 3", "divide the 8 devices"]),
    (dict(sampling__context=0), ["sampling.context is 0", "at least 1"]),
    (dict(sampling__context=3), ["sampling.context is 3", "divide the 8 devices"]),
    (dict(sampling__context=16, mesh__fsdp=2), ["sampling.context is 16", "divide the 8 devices"]),
    (
      dict(sampling__context=2, environment__harness="h.py:play"),
      ["sampling.context is 2", "environment.harness is 'h.py:play'", "set 1"],
    ),
    (
      dict(sampling__max_tokens=40000),
      ["data.max_prompt_tokens + sampling.max_tokens are 40012", "32768 positions"],
    ),
    (dict(sampling__stop_ids=[-1]), ["sampling.stop_ids holds -1", "0 to 17"]),
    (dict(sampling__stop_ids=[1, 18]), ["sampling.stop_ids holds 18", "0 to 17"]),
    (dict(model__dtype="float64"), ["model.dtype is 'float64'", "'float32', 'bfloat16'"]),
    (dict(sampling__dtype="int8"), ["sampling.dtype is 'int8'", "'float32', 'bfloat16'"]),
    (dict(sampling__weights_dtype="fp8"), ["sampling.weights_dtype is 'fp8'", "'', 'int8'"]),
    (dict(sampling__cache_dtype="fp8"), ["sampling.cache_dtype is 'fp8'", "'', 'int8'"]),
    (dict(model__num_kv_heads=3), ["model.num_heads is 4", "model.num_kv_heads = 3"]),
    (dict(model__head_dim=7), ["model.head_dim is 7", "even"]),
    (dict(model__num_layers=0), ["model.num_layers is 0", "at least 1"]),
    (dict(algo__advantage="nosuch"), ["algo.advantage is 'nosuch'", "'group_normalized'"]),
    (dict(algo__ratio="nosuch"), ["algo.ratio is 'nosuch'", "'token'"]),
    (dict(algo__surrogate="nosuch"), ["algo.surrogate is 'nosuch'", "'ppo_clip'"]),
    (dict(algo__aggregation="nosuch"), ["algo.aggregation is 'nosuch'", "'sequence_mean'"]),
    (dict(algo__kl="nosuch"), ["algo.kl is 'nosuch'", "'k3'"]),
    (dict(algo__kl_coef=-0.1), ["algo.kl_coef is -0.1", "at least 0"]),
    (dict(algo__clip_low=-0.2), ["algo.clip_low is -0.2", "above 0"]),
    (dict(algo__minibatches=5), ["algo.minibatches is 5", "divide batch.prompts = 32"]),
    (
      dict(algo__minibatches=8),
      ["algo.minibatches is 8", "batch.prompts / algo.minibatches = 4", "multiple of"],
    ),
    (
      dict(algo__surrogate="vespo", algo__ratio="sequence"),
      ["algo.ratio is 'sequence'", "vespo has its own ratio"],
    ),
    (
      dict(algo__ratio="sequence", algo__correction="mask", algo__correction_high=2.0),
      ["algo.correction_level is 'token'", "undoes the sequence ratio"],
    ),
    (
      dict(algo__kl="full", algo__kl_coef=0.1, algo__kl_in="reward"),
      ["algo.kl is 'full'", "choose k1, abs, k2 or k3"],
    ),
    (
      dict(algo__kl="full", algo__kl_importance_weighted=True),
      ["algo.kl_importance_weighted is True", "choose False"],
    ),
    (
      dict(algo__kl_coef=0.0, algo__kl_target=0.1),
      ["algo.kl_target is 0.1", "no reference; set algo.kl_coef"],
    ),
    (
      dict(algo__kl_coef=0.0, algo__ref_sync_steps=5),
      ["algo.ref_sync_steps is 5", "no reference; set algo.kl_coef"],
    ),
    (dict(algo__ref_mixup=0.0), ["algo.ref_mixup is 0.0", "(0, 1]"]),
    (dict(algo__overlong=1.0), ["algo.overlong is 1.0", "[0, 1)"]),
    (
      dict(algo__overlong=0.01),
      ["algo.overlong is 0.01", "sampling.max_tokens = 36", "not one token"],
    ),
    (
      dict(algo__overlong=0.2, algo__advantage="pass_at_k"),
      ["algo.overlong is 0.2", "counts right answers"],
    ),
    (
      dict(algo__advantage="process", algo__kl_coef=0.1, algo__kl_in="reward", algo__kl="k1"),
      ["algo.kl_in is 'reward'", "choose 'loss'"],
    ),
    (
      dict(algo__minibatches=4, algo__correction="truncate", algo__correction_high=2.0),
      ["algo.correction is 'truncate'", "algo.old_logprobs='recomputed'"],
    ),
    (dict(algo__dual_clip=1.0), ["algo.dual_clip is 1.0", "above 1"]),
    (dict(algo__ratio_max=0.5), ["algo.ratio_max is 0.5", "above 1"]),
    (
      dict(algo__kl_target=0.1, algo__kl_horizon=100),
      ["algo.kl_horizon is 100", "at least the 256 completions"],
    ),
    (
      dict(algo__dynamic_sampling=True, algo__advantage="gdpo"),
      ["algo.dynamic_sampling is True", "set False"],
    ),
    (dict(algo__max_resample_rounds=0), ["algo.max_resample_rounds is 0", "at least 1"]),
    (dict(algo__correction="truncate"), ["algo.correction is 'truncate'", "algo.correction_high"]),
    (dict(algo__kl_in="reward", algo__kl="k3+"), ["algo.kl is 'k3+'", "no gradient"]),
    (
      dict(algo__advantage="pass_at_k", algo__pass_k=8),
      ["algo.pass_k is 8", "below batch.group_size = 8"],
    ),
    (
      dict(algo__surrogate="clip_cov", algo__cov_low=6.0),
      ["algo.cov_low is 6.0", "below algo.cov_high"],
    ),
    (dict(algo__std_ddof=8), ["algo.std_ddof is 8", "below batch.group_size = 8"]),
    (dict(optimizer__schedule="step"), ["optimizer.schedule is 'step'", "'cosine'"]),
    (dict(optimizer__learning_rate=-1e-3), ["optimizer.learning_rate is -0.001", "at least 0"]),
    (dict(optimizer__name="adam"), ["optimizer.name is 'adam'", "choose one of 'adamw', "]),
    (
      dict(sampling__temperature_schedule="step"),
      ["sampling.temperature_schedule is 'step'", "'cosine'"],
    ),
    (dict(sampling__temperature_end=0.0), ["sampling.temperature_end is 0.0", "above 0"]),
    (
      dict(reward__functions=["nosuch"]),
      ["reward.functions", "'nosuch'", "strict", "path/file.py:function"],
    ),
    (dict(reward__functions=["no/file.py:f"]), ["reward.functions", "there is no file no/file.py"]),
    (
      dict(reward__functions=[f"{__file__}:nosuch"]),
      ["reward.functions", "defines no function 'nosuch'"],
    ),
    (
      dict(reward__functions=[f"{Path(__file__).parent}/golden/qwen2_tied"]),
      [
        "qwen2_tied/config.json: architectures is ['Qwen2ForCausalLM']",
        "of Qwen2ForSequenceClassification or",
      ],
    ),
    (
      dict(reward__functions=[f"{Path(__file__).parent}/golden/rewards/qwen2"], reward__batch=12),
      ["reward.batch is 12", "multiple of mesh.data x mesh.fsdp x mesh.expert = 8"],
    ),
    (dict(reward__batch=0), ["reward.batch is 0", "at least 1"]),
    (dict(reward__dtype="bfloat16"), ["reward.dtype is gone", "compute in model.dtype"]),
    (dict(reward__step_separator=""), ["reward.step_separator is ''", "at least one character"]),
    (
      dict(reward__weights=[1.0, 2.0]),
      ["reward.weights is (1.0, 2.0)", "one number for each", "'strict'"],
    ),
    (dict(reward__functions=[], reward__weights=[]), ["reward.weights is ()", "at least one"]),
    (dict(eval__function="nosuch"), ["'nosuch'", "strict"]),
    (dict(data__task="nosuch"), ["data.task='nosuch'", "arithmetic, gsm8k"]),
    (dict(data__path="somewhere"), ["data.path='somewhere'", "leave data.path empty"]),
    (dict(data__prompt="{quesiton}"), ["data.prompt='{quesiton}'", "{question}"]),
    (dict(data__system="Count."), ["data.system is 'Count.'", "set data.chat=True"]),
    (dict(data__chat=True), ["no chat template", "tokenizer_config.json", "data.chat=False"]),
    (dict(data__prompt=""), ["data.prompt=''", "has no field"]),
    (
      dict(data__max_prompt_tokens=3),
      ["data.max_prompt_tokens=3", "all 20000 prompts", "shortest one has 8 tokens"],
    ),
    (dict(data__tokenizer="no/tokenizer.json"), ["data.tokenizer", "no/tokenizer.json"]),
    (
      dict(model__path="no/model"),
      ["config key model.path is 'no/model'", "no such folder", "huggingface.co"],
    ),
  ],
  ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
def test_a_bad_value_is_named_and_nothing_is_written(tmp_path, changes, words):
  with pytest.raises(ConfigError) as error:
    train(config(**changes), str(tmp_path / "run"))
  message = str(error.value)
  assert "\n" not in message and all(word in message for word in words), message
  assert not list(tmp_path.iterdir())


def test_a_stop_text_that_no_completion_shows_is_refused(tmp_path):
  folder = make_checkpoint(tmp_path / "model", [row["question"] for row in problems(5)])
  whole = config().replace({"model.path": str(folder), "model.dtype": "float32"})

  def run(*stop, **changes):
    Run(whole.replace({"sampling.stop": stop} | changes))

  with pytest.raises(ConfigError, match=r"sampling.stop holds '<\|im_start\|>'.*put its id 2 into"):
    run("pens", "<|im_start|>")
  run("pens", "<|im_end|>")  # it ends completions anyway
  run("<|im_start|>", **{"sampling.stop_ids": (2,)})


def test_gsm8k_without_its_files(tmp_path):
  with pytest.raises(ConfigError) as error:
    train(config(data__task="gsm8k", data__path=str(tmp_path)), str(tmp_path / "run"))
  for word in ("data.path", str(tmp_path / "train.jsonl"), "train.jsonl and test.jsonl"):
    assert word in str(error.value)
  assert not list(tmp_path.iterdir())


# A run's folder.


@pytest.fixture
def run_folder(tmp_path):
  folder = tmp_path / "run"
  (folder / "checkpoints/2").mkdir(parents=True)
  (folder / "checkpoints/2/array").write_bytes(b"1")
  (folder / "config.json").write_text(json.dumps(to_dict(config())))
  (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
  return folder


@pytest.mark.parametrize(
  "changes, words",
  [
    (
      dict(optimizer__learning_rate=0.5),
      ["config.json has optimizer.learning_rate = 0.0003, this run 0.5"],
    ),
    (dict(seed=1), ["config.json has seed = 0, this run 1"]),
    pytest.param(
      dict(batch__prompts=64),
      ["config.json has batch.prompts = 32, this run 64"],
      marks=pytest.mark.slow,
    ),
    pytest.param(
      dict(warm_start__steps=10), ["config.json has warm_start.steps ="], marks=pytest.mark.slow
    ),
  ],
  ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
def test_another_config_leaves_a_run_alone(run_folder, changes, words):
  before = contents(run_folder)
  with pytest.raises(ConfigError, match="name another --workdir, or keep the old value") as error:
    train(config(**changes), str(run_folder))
  assert all(word in str(error.value) for word in words)
  assert contents(run_folder) == before


def test_a_run_may_become_longer_and_be_logged_and_computed_differently(run_folder):
  before = contents(run_folder)
  longer = config(
    steps=500,
    eval__every=7,
    checkpoint__every=3,
    log__every=2,
    mesh__fsdp=2,
    mesh__data=-1,
    batch__micro_batch=8,
    learner__remat=True,
    reward__batch=16,
  )
  with contextlib.ExitStack() as stack:
    Trainer(longer, run_folder, stack, leaving_on_second_signal)
  after = contents(run_folder)
  assert json.loads(after.pop("config.json"))["steps"] == 500
  (start,) = json.loads(after.pop("environment.json"))
  assert start["devices"] == 8 and start["platform"] == "cpu" and start["processes"] == 1
  assert after == {name: content for name, content in before.items() if name != "config.json"}


def test_a_folder_of_other_things_is_left_alone(tmp_path):
  (tmp_path / "thesis.tex").write_text("x")
  with pytest.raises(ConfigError) as error:
    train(config(), str(tmp_path))
  message = f"--workdir={tmp_path} is not empty and has no config.json: name a new folder"
  assert str(error.value) == message
  assert contents(tmp_path) == {"thesis.tex": b"x"}


@pytest.mark.parametrize(
  "text, message",
  [
    (None, "workdir {folder} has no config.json: it is not the folder of a run"),
    ("{", "{file} cannot be read (Expecting property name"),
    ("[]", "{file} cannot be read (it holds a list, not an object): put it back, or name another"),
    ('{"width": 3}', "{file} cannot be read: config key width is unknown: "),
    ('{"steps": "a"}', "{file} cannot be read: config key steps must be a whole number, got 'a'"),
    ('{"model": 3}', "{file} cannot be read: config key model must be a section of keys, got 3"),
  ],
)
def test_a_folder_without_a_usable_config_is_refused(tmp_path, text, message):
  file = tmp_path / "config.json"
  if text is not None:
    file.write_text(text)
  with pytest.raises(ConfigError) as error:
    read_config(tmp_path)
  message = message.replace("{folder}", str(tmp_path)).replace("{file}", str(file))
  assert str(error.value).startswith(message)
  assert "\n" not in str(error.value)


# The command line.


@pytest.fixture(scope="module")
def broken_model(tmp_path_factory):
  """A Hugging Face folder that lacks one tensor."""
  folder = tmp_path_factory.mktemp("model") / "broken"
  tokens = tokenizer.characters(ALPHABET)
  shape = model.ModelConfig(
    vocab_size=tokens.vocab_size,
    embed_dim=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_dim=4,
    mlp_dim=8,
  )
  abstract = jax.eval_shape(lambda key: model.init(key, shape), jax.random.key(0))
  model.save(folder, shape, jax.tree.map(lambda x: np.zeros(x.shape, np.float32), abstract))
  tokens.save(folder)
  tensors = load_file(folder / "model.safetensors")
  del tensors["model.norm.weight"]
  save_file(tensors, folder / "model.safetensors")
  return folder


CONFIG = "--config=configs/arithmetic.py"
# name: (flags, words of the message). RUN, MODEL and FILE stand for paths.
COMMANDS = {
  "unknown key": (
    [CONFIG, "RUN", "--config.algo.clip_hih=0.3"],
    ["config key algo.clip_hih is unknown: did you mean algo.clip_high?"],
  ),
  "wrong type": (
    [CONFIG, "RUN", "--config.steps=abc"],
    ["config key steps must be a whole number, got 'abc'"],
  ),
  "float for int": (
    [CONFIG, "RUN", "--config.steps", "1.5"],
    ["config key steps must be a whole number, got '1.5'"],
  ),
  "unknown preset": (
    ["--config=configs/arithmetic.py:nosuch", "RUN"],
    ["has no preset 'nosuch'", "grpo"],
  ),
  "missing file": (
    ["--config=configs/nosuch.py", "RUN", "--config.steps=3"],
    ["there is no file 'configs/nosuch.py'"],
  ),
  "error in the file": (
    ["--config=FILE", "RUN"],
    ["broken.py line 2: ZeroDivisionError: division by zero"],
  ),
  "no config": (["RUN"], ["flag --config is missing", "configs/arithmetic.py"]),
  "no workdir": ([CONFIG], ["flag --workdir is missing", "folder"]),
  "no flag": (
    [CONFIG, "RUN", "config.steps=3"],
    ["argument 'config.steps=3' is not a flag", "--name=value"],
  ),
  "missing tensor": (
    [CONFIG, "RUN", "--config.model.path=MODEL"],
    ["MODEL has no tensor model.norm.weight", "download it again"],
  ),
}


@pytest.fixture
def command(tmp_path, broken_model):
  """command(NAME) -> the flags of that command. Its workdir is RUN in the folder of the test."""
  (tmp_path / "broken.py").write_text("def get_config():\n  return 1 / 0\n")
  paths = {
    "RUN": f"--workdir={tmp_path / 'RUN'}",
    "MODEL": str(broken_model),
    "FILE": str(tmp_path / "broken.py"),
  }

  def command(name):
    for flag in COMMANDS[name][0]:
      for word, path in paths.items():
        flag = flag.replace(word, path)
      yield flag

  return command


def assert_refused(code, out, err, words):
  """Nothing but one line with these words was written."""
  assert (code, out) == (2, "")
  (line,) = err.splitlines()
  assert line.startswith("error: ") and all(word in line for word in words), line


@pytest.mark.parametrize("name", COMMANDS)
def test_a_bad_command_ends_in_one_line(start, command, broken_model, tmp_path, name):
  words = [word.replace("MODEL", str(broken_model)) for word in COMMANDS[name][1]]
  assert_refused(*start("train", *command(name)), words)
  workdir = tmp_path / "RUN"
  assert not (workdir / "metrics.jsonl").exists() and not (workdir / "checkpoints").exists()


@pytest.mark.slow
def test_a_bad_command_ends_in_one_line_in_a_process_of_its_own(command):
  """One that fails late, after JAX has written what it writes."""
  done = subprocess.run(
    [sys.executable, "-m", "grpo_jax.train", *command("missing tensor")],
    cwd=ROOT,
    capture_output=True,
    text=True,
    env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"},
    timeout=600,
  )
  assert_refused(done.returncode, done.stdout, done.stderr, ["has no tensor model.norm.weight"])


@pytest.mark.parametrize("name", ["evaluate", "sample", "export", "plan"])
def test_the_other_programs_end_in_one_line_too(start, name):
  assert_refused(*start(name, "--nosuch=3"), ["error: Unknown command line flag 'nosuch'"])


@pytest.mark.slow
def test_prompts_that_are_too_long_are_counted(start, tmp_path):
  keys = ("data.max_prompt_tokens=10", "steps=0", "warm_start.steps=0", "eval.every=0")
  flags = [f"--config.{key}" for key in keys]
  code, out, err = start("train", CONFIG, f"--workdir={tmp_path / 'run'}", *flags)
  assert code == 0, err
  (line,) = [line for line in out.splitlines() if "left out" in line]
  assert "data.max_prompt_tokens = 10" in line
  words = line.replace(",", "").split()
  dropped, remaining = (int(word) for word in words if word.isdecimal() and len(word) > 2)
  assert 0 < dropped < dropped + remaining == 20_000
