"""docs/from_verl.md: keys exist, defaults are those of both programs, and what it shows works."""

import ast
import dataclasses
import functools
import os
from pathlib import Path
import re
import shlex
import sys

from absl import flags as absl_flags
from gsm8k_test import SMALL, finish, start
from ml_collections import config_flags
import pytest
from small_qwen import make_checkpoint, problems
from small_run import small_config, with_section

import grpo_jax
from grpo_jax import config as config_lib
from grpo_jax import rewards
from grpo_jax.algo.presets import PRESETS
from grpo_jax.config import Config
from grpo_jax.data.tasks import tasks
from grpo_jax.run import checks

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
import tables

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/from_verl.md").read_text()
METRICS = "| verl | here | notes |"
VERL = os.environ.get("VERL_DIR", "")  # a checkout of the commit that the page names
needs_verl = pytest.mark.skipif(not VERL, reason="no checkout of verl: set VERL_DIR")
SECTIONS = [
  field.name for field in dataclasses.fields(Config) if dataclasses.is_dataclass(field.type)
]


def code(text):
  """The words in backticks, without blocks of code."""
  return re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def blocks(language):
  return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


def table_rows(header, page=PAGE):
  """The cells of all rows of the tables with this header."""
  for table in page.split(header)[1:]:
    for line in table.split("\n\n")[0].strip().splitlines()[1:]:
      cells = [cell.strip() for cell in line.strip("|").split("|")]
      assert len(cells) == header.count("|") - 1, line
      yield cells


ROWS = [row for rows in tables.verl_parts().values() for row in rows]
VERL_KEYS = {name for row in ROWS for name in row["verl"]}
# What is written by hand, in the page and in the rows.
TEXT = "\n".join([tables.MARKS.sub("", PAGE), *(row["note"] for row in ROWS)])


def settings():
  """Every key=value of the text, outside blocks of code."""
  words = [word for word in code(TEXT) if "=" in word and not word.startswith("--")]
  words = [word for word in words if word.partition("=")[0] not in VERL_KEYS]
  return sorted({word for word in words if word.split(".")[0] in SECTIONS})


def nested(key, text):
  """The settings of a config with one key changed."""
  try:
    value = ast.literal_eval(text)
  except (ValueError, SyntaxError):
    value = text
  for name in reversed(key.split(".")):
    value = {name: value}
  return value


def flag_blocks():
  """The flags of each block of code that has any."""
  words = [shlex.split(block.replace("\\\n", " ")) for block in blocks("")]
  words = [[word for word in block if word.startswith("--")] for block in words]
  return [block for block in words if block]


def parsed(words, monkeypatch):
  """The config that the command line makes of flags, as `python -m grpo_jax.train` does."""
  if not any(word.startswith("--config=") for word in words):
    words = ["--config=configs/default.py", *words]
  monkeypatch.chdir(ROOT)
  monkeypatch.setattr(sys, "argv", ["train", *words])  # where config_flags looks for keys
  values = absl_flags.FlagValues()
  absl_flags.DEFINE_string("workdir", "", "", flag_values=values)
  config_flags.DEFINE_config_file("config", flag_values=values)
  assert values(sys.argv) == ["train"]
  return config_lib.from_dict(values.config.to_dict())


def test_a_table_shows_each_key_with_its_default():
  rows = [
    {"verl": {"a.x": 1, "a.y": None, "b.z": "?" * 3}, "here": ["seed", "--workdir"], "note": "n"},
    {"verl": {f"actor_rollout_ref.{one}.m": 2 for one in ("actor", "ref")}, "here": [], "note": ""},
  ]
  assert [*tables.verl_table(rows)][1:] == [
    "| `a.{x=1, y=null}`, `b.z` | `seed=0`, `--workdir` | n |",
    "\nNot here:\n",
    "* `actor_rollout_ref.{actor,ref}.m`",
  ]


def test_verls_keys_are_in_the_table_once():
  assert len(VERL_KEYS) > 300
  assert len(VERL_KEYS) == sum(len(row["verl"]) for row in ROWS)
  assert sum(len(row["here"]) for row in ROWS) > 80


def test_every_key_in_the_text_exists():
  keys = [word for word in code(TEXT) if re.fullmatch(rf"({'|'.join(SECTIONS)})\.\w+", word)]
  keys = [key for key in keys if key not in VERL_KEYS]
  assert len(keys) > 40
  for key in keys:
    config_lib.check_key(key)


@pytest.mark.parametrize("setting", settings())
def test_every_value_in_the_text_is_allowed(setting):
  key, _, text = setting.partition("=")
  config = config_lib.from_dict(nested(key, text))
  needed = {"algo.correction": {"correction_high": 3.0}, "algo.kl_in": {"kl": "k1"}}
  algo = dataclasses.replace(config.algo, **needed.get(key, {}))
  checks.check_config(dataclasses.replace(config, algo=algo))


@pytest.mark.parametrize("words", flag_blocks(), ids=lambda words: words[0].lstrip("-"))
def test_every_command_makes_a_config_that_passes_the_checks(words, monkeypatch):
  checks.check_config(parsed(words, monkeypatch))


def test_presets_and_reward_functions_of_the_text_exist():
  for preset in re.findall(r"default\.py:(\w+)", PAGE):
    assert preset in PRESETS
  for word in ("strict", "code", "soft_overlong(max_length=2048, margin=512)"):
    assert f"`{word}`" in PAGE
    rewards.resolve(word, "reward.functions", is_model=lambda name: False)


def test_strict_reads_the_answers_that_the_text_names():
  accepted = re.search(r"GSM8K. It also accepts (.*?),\s+which", PAGE).group(1)
  texts = [f"#### {answer}" for answer in code(accepted)]
  assert len(texts) == 3
  assert rewards.REWARDS["strict"](completions=texts, answer=["72"] * 3) == [1.0] * 3


def verl_row(problem, number, split):
  """A row with verl's columns. Every second one is of another data source."""
  question = problem["question"] + ' Output the final answer after "####".'
  truth = problem["answer"].rpartition("#### ")[2]
  return {
    "data_source": ("openai/gsm8k", "aime")[number % 2],
    "prompt": [{"role": "user", "content": question}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": truth},
    "extra_info": {"split": split, "index": number},
  }


def write_verl_files(folder):
  parquet = pytest.importorskip("pyarrow.parquet")
  import pyarrow

  folder.mkdir()
  for split, count in (("train", 24), ("test", 12)):
    rows = [verl_row(problem, i, split) for i, problem in enumerate(problems(count))]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{split}.parquet")


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """A folder with verl's files, a compute_score and the page's adapter, which is the cwd."""
  write_verl_files(tmp_path / "theirs")
  (tmp_path / "my_scores.py").write_text(
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    '  assert data_source in ("openai/gsm8k", "aime") and "index" in extra_info\n'
    "  right = solution_str.endswith(ground_truth)\n"
    '  return {"score": float(right), "acc": right} if right else 0\n'
  )
  (tmp_path / "my_rewards.py").write_text(blocks("python")[0])
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(tmp_path))
  yield tmp_path
  sys.modules.pop("my_scores", None)


def columns_task(path, **settings):
  return tasks.make_task(config_lib.Data(task="columns", path=path, **settings))


def builtin_words(folder):
  """The flags of the page for built-in functions, with the sources of the folder's rows."""
  words = next(
    words for words in flag_blocks() if any("task=data_source" in word for word in words)
  )
  changes = {
    "FOLDER": str(folder),
    "DigitalLearningGmbH/MATH-lighteval": "aime",
    "math": "flexible",
  }
  for old, new in changes.items():
    words = [word.replace(old, new) for word in words]
  return words


def test_built_in_functions_read_files_of_verl_by_their_data_source(folder, monkeypatch):
  config = parsed(builtin_words(folder / "theirs"), monkeypatch)
  checks.check_config(config)
  assert config.reward.tasks == ("openai/gsm8k", "aime")
  example = tasks.make_task(config.data).train[3]
  assert example["answer"] == example["reward_model"]["ground_truth"]
  assert example["task"] == example["data_source"] == ("aime" if 3 % 2 else "openai/gsm8k")
  assert example["prompt"][0]["role"] == "user"


def test_the_adapter_scores_rows_of_verl(folder):
  score = rewards.resolve("my_rewards.py:verl_score", "reward.functions", lambda name: False)
  examples = columns_task("theirs").train[:2]
  logged = {}
  truth = examples[0]["reward_model"]["ground_truth"]
  scores = score(
    completions=[f"It is {truth}", "no idea"],
    log_extra=lambda column, values: logged.update({column: values}),
    step=1,
    **{name: [example[name] for example in examples] for name in examples[0]},
  )
  assert scores == [1.0, 0]
  assert logged == {"compute_score": [{"score": 1.0, "acc": True}, {"score": 0}]}


@pytest.mark.slow
def test_every_metric_of_ours_is_in_a_run(tmp_path):
  config = small_config(kl_target=0.1, reject_k3=1e6)
  config = with_section(config, "eval", every=1, examples=4, batch=4, samples=4)
  grpo_jax.train(config, tmp_path)
  found = {name for row in grpo_jax.read_metrics(tmp_path) for name in row}
  compared = 0
  for verl, here, _ in table_rows(METRICS, tables.MARKS.sub("", PAGE)):
    ours = code(here)
    assert len(ours) in (0, len(code(verl))), verl
    assert ours or here == "not here", verl
    assert set(ours) <= found, ours
    compared += len(ours)
  assert compared > 30
  # Of verl's critic/score/max there is no counterpart, and the notes name others.
  for name in ("reward_std", "clip_ratio/low_mean", "clip_ratio/high_mean", "num_tokens"):
    assert f"`{name}`" in PAGE and name in found


def run_on_files_of_verl(folder, *words):
  """The last row of metrics of a run on the folder's files."""
  checkpoint = folder / "hf"
  checkpoint.mkdir()
  make_checkpoint(checkpoint, [p["question"] + p["answer"] for p in problems(24)])
  process = start(
    "train",
    "--config=configs/default.py",
    f"--config.model.path={checkpoint}",
    f"--workdir={folder / 'run'}",
    *words,
    "--config.data.max_prompt_tokens=128",
    *SMALL,
  )
  finish(process)
  return grpo_jax.read_metrics(folder / "run")[-1]


@pytest.mark.slow
def test_a_run_learns_from_files_of_verl_as_they_are(folder, monkeypatch):
  words = next(words for words in flag_blocks() if any("verl_score" in word for word in words))
  words = [word.replace("FOLDER", str(folder / "theirs")) for word in words]
  words = [word.replace("'my_rewards", f"'{folder}/my_rewards") for word in words]
  monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT)]))
  words += [f"--config.eval.function={folder}/my_rewards.py:verl_score"]
  assert "rewards/verl_score/mean" in run_on_files_of_verl(folder, *words)


@pytest.mark.slow
def test_a_run_scores_files_of_verl_by_their_data_source(folder):
  words = [*builtin_words(folder / "theirs"), "--config.log.completions_every=1"]
  last = run_on_files_of_verl(folder, *words, "--config.eval.every=1")
  assert {"eval/accuracy/aime", "eval/accuracy/openai/gsm8k"} <= last.keys()
  rows = grpo_jax.read_completions(folder / "run")
  scored = {(row["rewards/strict"] is None, row["rewards/flexible"] is None) for row in rows}
  assert scored == {(True, False), (False, True)}


def flat(values, beginning=""):
  """{"a": {"b": 1}} as {"a.b": 1}."""
  found = {}
  for name, value in values.items():
    if isinstance(value, dict) and value:
      found |= flat(value, f"{beginning}{name}.")
    found[beginning + name] = value
  return found


def resolved(value, values):
  """A default without OmegaConf's references to others."""
  import yaml

  if not isinstance(value, str):
    return value
  whole = re.fullmatch(r"\$\{oc\.select:([^,}]+),\s*(.+)\}", value)
  if whole:
    key, otherwise = whole.groups()
    return resolved(values[key], values) if key in values else yaml.safe_load(otherwise)
  return re.sub(r"\$\{([\w.]+)\}", lambda match: str(resolved(values[match[1]], values)), value)


@functools.cache
def verl_values(engine):
  """A YAML file of verl, without sections."""
  import yaml

  file = Path(VERL) / f"verl/trainer/config/_generated_{engine}_trainer.yaml"
  return flat(yaml.safe_load(file.read_text()))


def verl_default(key):
  """A default in verl's three YAML files, of the first that has the key. "???" if none has."""
  for engine in ("ppo", "ppo_megatron", "ppo_veomni"):
    values = verl_values(engine)
    if key in values:
      return resolved(values[key], values)
  return "???"


@needs_verl
def test_verls_defaults_are_those_of_its_yaml_files():
  for name, default in (pair for row in ROWS for pair in row["verl"].items()):
    assert verl_default(name) == default, name


@needs_verl
def test_every_key_of_verls_page_and_scripts_is_in_the_table():
  scripts = sorted((Path(VERL) / "examples/grpo_trainer").glob("*.sh"))
  lines = [line.split(" #")[0] for script in scripts for line in script.read_text().splitlines()]
  text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
  key = r"(?<![\w.$/{-])[+~]{0,2}([A-Za-z_][\w@]*(?:\.[\w-]+)+|model_engine|\w+@[\w.]+)="
  used = set(re.findall(key, text))
  assert len(scripts) > 40 and len(used) > 250
  page = (Path(VERL) / "docs/algo/grpo.md").read_text()
  used |= set(re.findall(r"`((?:actor_rollout(?:_ref)?|data|algorithm)\.[\w.]+)`", page))
  # The page writes a key that no YAML file has. The notes say so.
  assert used - VERL_KEYS == {"actor_rollout.ref.rollout.n"}
