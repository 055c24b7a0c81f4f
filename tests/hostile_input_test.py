"""Input that nobody means ends in one line: nothing hangs, and nothing is taken quietly.

Most goes through `train`, or through the programs as the command line starts them.
"""

import contextlib
import json
import math
import os
from pathlib import Path
import shutil
import signal
import threading

from errors_test import config
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from grpo_jax import model
from grpo_jax.data.files import download
from grpo_jax.data.tasks.arithmetic import ALPHABET
from grpo_jax.data.tokenizers import chat, tokenizer
from grpo_jax.run.run import Run
from grpo_jax.settings import LARGEST_INT, ConfigError, shown
from grpo_jax.train import train
from grpo_jax.training.reporter import header_lines

SHAPE = model.ModelConfig(
  vocab_size=18,
  embed_dim=8,
  num_layers=2,
  num_heads=2,
  num_kv_heads=2,
  head_dim=4,
  mlp_dim=8,
)


def short(value):
  """The name of a case: some values are long, and pytest cannot print all of them."""
  return shown(value)[:40]


@pytest.fixture(autouse=True)
def nothing_hangs():
  """SIGALRM ends a test that waits for ever."""
  signal.alarm(60)
  yield
  signal.alarm(0)


@pytest.fixture
def folder(tmp_path):
  """A Hugging Face folder of two layers with its tokenizer."""
  abstract = jax.eval_shape(lambda key: model.init(key, SHAPE), jax.random.key(0))
  params = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), abstract)
  model.save(tmp_path / "hf", SHAPE, params)
  tokenizer.characters(ALPHABET).save(tmp_path / "hf")
  return tmp_path / "hf"


def refused(tmp_path, *words, **changes):
  """Trains with a config that must be refused in one line with these words. Returns the line."""
  with pytest.raises(ConfigError) as error:
    train(config(**changes), tmp_path / "run")
  line = str(error.value)
  assert "\n" not in line and all(word in line for word in words), line
  assert not (tmp_path / "run/metrics.jsonl").exists()
  assert not (tmp_path / "run/checkpoints").exists()
  return line


def edit(file, **fields):
  file.write_text(json.dumps(json.loads(file.read_text()) | fields))


# Numbers.

BEYOND = LARGEST_INT + 1


@pytest.mark.parametrize(
  "key, value, words",
  [
    *(
      (key, BEYOND, f"between -{LARGEST_INT} and {LARGEST_INT}")
      for key in ("seed", "steps", "checkpoint__every", "optimizer__warmup_steps", "mesh__data")
    ),
    ("seed", -(10**30), "between"),
    ("steps", 10**5000, "value of type int that cannot be printed"),
    ("sampling__stop_ids", (3, BEYOND), "between"),
    ("sampling__max_tokens", LARGEST_INT, "at most 16777216"),
    ("data__max_prompt_tokens", LARGEST_INT, "at most 16777216"),
    ("model__num_layers", 10**6, "at most 512"),
    ("model__embed_dim", 10**6, "at most 131072"),
    ("batch__prompts", 10**9, "at most 1048576"),
    ("batch__group_size", 10**9, "at most 1048576"),
    ("warm_start__batch", 10**9, "at most 1048576"),
    ("eval__samples", 10**9, "at most 1048576"),
    ("algo__updates_per_batch", 10**9, "at most 1000"),
    ("optimizer__learning_rate", math.inf, "must be finite"),
    ("optimizer__learning_rate", math.nan, "at least 0"),
    ("optimizer__learning_rate", 1e-40, "must be finite, and its size 0 or between"),
    ("optimizer__max_grad_norm", math.inf, "must be finite"),
    ("optimizer__eps", math.inf, "must be finite"),
    ("algo__clip_high", math.inf, "must be finite"),
    ("algo__cov_low", math.nan, "must be finite"),
    ("reward__weights", (math.nan,), "must be finite"),
    ("data__prompt", "\ud800{question}", "must be text"),
    ("data__path", "a\0b", "must be text"),
  ],
  ids=short,
)
def test_a_number_that_the_devices_cannot_hold_is_refused(tmp_path, key, value, words):
  refused(tmp_path, f"config key {key.replace('__', '.')} is ", words, **{key: value})


def test_products_that_the_devices_cannot_hold_are_refused(tmp_path):
  refused(tmp_path, "steps is 2147483647", "updates", steps=LARGEST_INT, warm_start__steps=9)
  refused(tmp_path, "batch.prompts is 1048576", batch__prompts=2**20, batch__group_size=2**10)
  refused(tmp_path, "eval.batch is 1048576", eval__batch=2**20, eval__samples=2**10)


def test_a_model_larger_than_the_memory_is_refused(tmp_path):
  shape = dict(model__embed_dim=2**17, model__mlp_dim=2**17)
  refused(tmp_path, "the parameters alone take", "GB of memory", "lower model.embed_dim", **shape)


def test_an_int_too_large_for_a_float_is_refused():
  with pytest.raises(ConfigError, match="optimizer.learning_rate must be a number, got 1000"):
    config(optimizer__learning_rate=10**400)


@pytest.mark.parametrize("surrogate", ["ppo_clip", "clip_cov", "dppo_tv"])
def test_a_clip_that_bounds_nothing_is_refused(tmp_path, surrogate):
  words = ["algo.clip_low is 1.0", f"so {surrogate} would have no lower bound"]
  refused(tmp_path, *words, algo__surrogate=surrogate, algo__clip_low=1.0)


# Data.

ROW = {"question": "1+1=", "answer": "#### 2"}


@pytest.mark.parametrize(
  "line, words",
  [
    ('{"question": "\\ud800?", "answer": "#### 2"}', "half of a surrogate pair"),
    ('{"question": "?", "answer": "\\udfff #### 2"}', "half of a surrogate pair"),
    (
      '{"question": [{"role": "user", "content": "?", "x": ["\\ud800"]}], "answer": "#### 2"}',
      "half of a surrogate pair",
    ),
    ('{"n": ' + "9" * 10_000 + "}", "is not JSON"),
    ("[" * 100_000, "is not JSON"),
    (
      '{"question": [{"role": "user", "content": "?", "x": '
      + "[" * 90
      + "]" * 90
      + '}], "answer": "#### 2"}',
      "more than 32 levels",
    ),
  ],
  ids=["surrogate", "surrogate in the answer", "surrogate within", "digits", "deep", "levels"],
)
def test_a_row_that_cannot_be_used_is_named_with_its_line(tmp_path, line, words):
  for split in ("train", "test"):
    (tmp_path / f"{split}.jsonl").write_text(f"{json.dumps(ROW)}\n{line}\n")
  place = f"{tmp_path}/train.jsonl line 2"
  refused(tmp_path, place, words, data__task="gsm8k", data__path=str(tmp_path))


def one_problem(folder):
  """Changes of a config for a training split and a test split of one problem."""
  for split in ("train", "test"):
    (folder / f"{split}.jsonl").write_text(json.dumps(ROW))
  return dict(data__task="gsm8k", data__path=str(folder))


@pytest.mark.parametrize("prompt", ["Solve:", "{question:>999999999}", "{question.__class__}"])
def test_a_prompt_that_cannot_be_filled_is_refused(tmp_path, prompt):
  refused(tmp_path, f"data.prompt={prompt!r}", data__prompt=prompt)


@pytest.mark.parametrize("hangs", [False, True], ids=["no network", "no answer"])
def test_gsm8k_without_a_network_is_told_at_once(tmp_path, monkeypatch, capsys, hangs):
  pytest.importorskip("tensorflow_datasets")
  import requests

  over = threading.Event()

  def head(url, timeout):
    if hangs:
      over.wait(30)
    raise OSError("no route\nto it")

  monkeypatch.setattr(requests, "head", head)
  monkeypatch.setattr(download, "_SECONDS", 0.2 if hangs else 20)
  monkeypatch.setattr("tensorflow_datasets.core.constants.DATA_DIR", str(tmp_path / "tfds"))
  words = "has not answered for 0.2 seconds" if hangs else "cannot be reached: no route to it"
  refused(tmp_path, "data.task=gsm8k", words, "data.path=FOLDER", data__task="gsm8k")
  assert "downloading GSM8K (https://" in capsys.readouterr().err
  over.set()


@pytest.mark.parametrize(
  "template, words",
  [
    (
      "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
      "did not end within 1 second",
    ),
    pytest.param(
      "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
      "did not end within 1 second",
      marks=pytest.mark.slow,
    ),
    pytest.param("{{ 9 ** (9 ** 9) }}", "did not end within 1 second", marks=pytest.mark.slow),
    ("{{ 'a' * 10 ** 10 }}", "MemoryError"),
    ("{{ messages[0].content.ljust(10 ** 10) }}", "MemoryError"),
    ("{{ messages[0].content * 10 ** 7 }}", "more than 10000000 characters"),
    ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "cannot be read: RecursionError"),
    ("{{ '\\ud800' }}", "half of a surrogate pair"),
  ],
  ids=short,
)
def test_a_chat_template_has_limits(tmp_path, folder, monkeypatch, template, words):
  monkeypatch.setattr(chat, "SECONDS", 1)
  monkeypatch.setattr(chat, "_PROCESS", chat._Process())
  edit(folder / "tokenizer_config.json", chat_template=template)
  changes = dict(model__path=str(folder), data__chat=True, **one_problem(tmp_path))
  refused(tmp_path, "the chat template in tokenizer_config.json cannot", words, **changes)
  # The process that died is started again.
  assert chat.Template("{{ messages[0].content }}", "x").render(
    [[{"role": "user", "content": str(i)}] for i in range(200)], True, {}
  ) == [str(i) for i in range(200)]


# Files.


@pytest.mark.parametrize("name", ["train.jsonl", "test.jsonl"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_a_data_file_that_is_no_file_is_refused(tmp_path, name, make):
  for split in ("train.jsonl", "test.jsonl"):
    if split != name:
      (tmp_path / split).write_text(json.dumps(ROW))
  make(tmp_path / name)
  refused(tmp_path, "data.path", name, data__task="gsm8k", data__path=str(tmp_path))


@pytest.mark.parametrize(
  "name", ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors"]
)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_a_model_file_that_is_no_file_is_refused(tmp_path, folder, name, make):
  (folder / name).unlink()
  make(folder / name)
  refused(tmp_path, str(folder), model__path=str(folder))


def test_shards_without_an_index_and_an_index_that_leads_away_are_refused(tmp_path, folder):
  path = dict(model__path=str(folder))
  (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
  refused(tmp_path, "1 parts of a model", "no model.safetensors.index.json", **path)
  shutil.copy(folder / "model-00001-of-00002.safetensors", tmp_path / "x.safetensors")
  for name in ("../x.safetensors", f"{tmp_path}/x.safetensors", 3):
    index = {"weight_map": {"model.norm.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(tmp_path, f"lists {name!r}, which is not the name of a file beside it", **path)


@pytest.mark.slow
def test_weights_that_are_not_finite_are_named(tmp_path, folder):
  tensors = load_file(folder / "model.safetensors")
  tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = math.inf
  tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = math.nan
  save_file(tensors, folder / "model.safetensors")
  words = ["tensor model.layers.1.mlp.down_proj.weight", "NaN or infinite"]
  refused(tmp_path, *words, model__path=str(folder), eval__every=0, **one_problem(tmp_path))
  tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = 0
  save_file(tensors, folder / "model.safetensors")
  with pytest.raises(ConfigError, match="tensor model.layers.1.mlp.up_proj.weight, .* NaN or"):
    model.load(folder)


@pytest.mark.parametrize(
  "fields, words",
  [
    (dict(num_hidden_layers=10**6), "num_hidden_layers is 1000000, more than any model has"),
    (dict(num_hidden_layers=4000, layer_types=None), "no tensor model.layers.2."),
    (dict(vocab_size=10**9), "tensor model.embed_tokens.weight is (18, 8), by config.json"),
    (dict(vocab_size=10**30), "vocab_size must be a positive int"),
    (dict(hidden_size=10**6), "by config.json it should be"),
    (dict(rms_norm_eps=math.nan), "rms_norm_eps must be a positive float"),
    (dict(rope_parameters=[1]), "rope_parameters must be an object"),
    (dict(rope_parameters="yarn"), "rope_parameters must be an object"),
    (dict(rope_parameters={"full_attention": 3}), "rope_parameters must be an object"),
    (dict(rope_scaling={"rope_type": []}), "rope_scaling is of type []"),
  ],
)
def test_a_config_json_of_no_model_is_refused_before_anything_is_built(
  tmp_path, folder, fields, words
):
  edit(folder / "config.json", **fields)
  refused(
    tmp_path,
    "config.json" if "tensor" not in words else str(folder),
    words,
    **{"model__path": str(folder)},
  )


ODD = [None, [], {}, "x", -1, 0, 1.5, 10**12, math.nan, True, [[]], [None], {"a": 1}]
ODD_ROPE = [
  {"rope_type": "yarn"},
  {"rope_type": "llama3", "factor": "x"},
  {"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": "x"},
  {"rope_type": "yarn", "factor": 2.0, "attention_factor": "x"},
  {"rope_type": "yarn", "factor": 2.0, "mscale": "x", "mscale_all_dim": [1]},
  {"rope_type": "yarn", "factor": 2.0, "truncate": [1]},
  {"rope_theta": [1]},
  {"rope_type": "longrope"},
  {"rope_type": "longrope", "short_factor": ["x"], "long_factor": [1.0]},
  {"partial_rotary_factor": [1]},
  {"llama_4_scaling_beta": 0.1},
]


ADDED = {"no_rope_layer_interval", "partial_rotary_factor", "attention_bias", "text_config"}


@pytest.mark.parametrize(
  "family",
  [
    "gemma3",
    *(
      pytest.param(x, marks=pytest.mark.slow)
      for x in (
        "qwen3_moe",
        "llama3",
        "phi3",
        "phi3_longrope",
        "ministral3",
        "smollm3_window",
        "granite",
        "olmo3",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_next",
        "gpt_oss",
        "deepseek_v3_yarn",
        "glm4_moe",
        "glm4_moe_lite",
        "gemma3_images",
        "gemma4",
        "gemma4_e",
        "gemma4_moe",
        "gemma4_images",
      )
    ),
  ],
)
def test_every_field_of_config_json_is_read_or_refused(tmp_path, family):
  """No odd value of any field ends in another exception than ConfigError."""
  values = json.loads((Path(__file__).parent / f"golden/families/{family}/config.json").read_text())
  for key in {
    *values,
    "rope_scaling",
    "rope_parameters",
    "layer_types",
    "num_local_experts",
  } | ADDED:
    for odd in ODD + (ODD_ROPE if key.startswith("rope") else []):
      (tmp_path / "config.json").write_text(json.dumps(values | {key: odd}))
      with contextlib.suppress(ConfigError):
        model.load_model_config(tmp_path)


# Adapters.


def adapters_of(folder, base, shape=SHAPE):
  lora = model.AdapterShape(rank=2, alpha=32.0, rslora=False, targets=("q",))
  shape = model.ModelConfig(**{**vars(shape), "lora": lora})
  whole = jax.eval_shape(lambda key: model.init(key, shape), jax.random.key(0))
  adapters = model.init_adapters(jax.random.key(0), shape, whole)
  model.save_adapters(folder, shape, adapters, base)
  return str(folder)


@pytest.mark.slow
def test_adapters_of_another_model_are_refused_or_told(tmp_path, folder):
  lora = dict(lora__rank=2, lora__targets=["q_proj"], warm_start__steps=0)
  changes = dict(model__path=str(folder), **lora)
  larger = model.ModelConfig(**{**vars(SHAPE), "embed_dim": 16})
  other = adapters_of(tmp_path / "other", "someone/larger", larger)
  refused(tmp_path, "it is the adapter of another one", lora__path=other, **changes)
  assert not (tmp_path / "run").exists()  # it is noticed before anything is written
  for base, is_told in (("someone/else", True), ("someone/HF", False), ("", False)):
    path = adapters_of(tmp_path / f"adapters {is_told} {len(base)}", base)
    run = Run(config(lora__path=path, **changes), devices=jax.devices()[:1])
    lines = [
      line for line in header_lines(run, [], run.remarks, 0, tmp_path) if "lora.path" in line
    ]
    assert len(lines) == is_told and all("trained on 'someone/else'" in line for line in lines)


@pytest.mark.slow
def test_many_updates_with_neither_a_ratio_nor_a_kl_are_told(tmp_path):
  for kl_coef, is_told in ((0.0, True), (0.04, False)):
    algo = dict(algo__surrogate="reinforce", algo__updates_per_batch=8, algo__kl_coef=kl_coef)
    run = Run(config(**algo), devices=jax.devices()[:1])
    lines = [
      line for line in header_lines(run, [], run.remarks, 0, tmp_path) if "has no ratio" in line
    ]
    assert len(lines) == is_told and all("the 8 updates per batch" in line for line in lines)


def test_adapters_that_are_not_finite_are_named(tmp_path, folder):
  path = adapters_of(tmp_path / "adapters", "hf")
  tensors = load_file(f"{path}/adapter_model.safetensors")
  name = sorted(tensors)[0]
  tensors[name][0, 0] = math.nan
  save_file(tensors, f"{path}/adapter_model.safetensors")
  lora = dict(lora__rank=2, lora__targets=["q_proj"], lora__path=path, warm_start__steps=0)
  run = Run(config(model__path=str(folder), **lora), devices=jax.devices()[:1])
  with pytest.raises(ConfigError, match=f"tensor {name} has a value that is NaN"):
    run.initial_params()


# Programs, as the command line starts them.


@pytest.mark.parametrize(
  "source, words",
  [
    ("import sys\nsys.exit(0)\n", "FILE line 2: SystemExit: a config file must not end"),
    ("def get_config():\n  raise SystemExit\n", "FILE line 2: SystemExit"),
    ("x = 1\n", "FILE defines no get_config()"),
    ("def get_config(:\n", "FILE line 1: SyntaxError: "),
    ("import nosuchmodule\n", "FILE line 1: ModuleNotFoundError: No module named 'nosuch"),
    ("def get_config():\n  raise BaseException('x\\ny')\n", "FILE line 2: BaseException: x y"),
    ("def get_config():\n  return get_config()\n", "FILE line 2: RecursionError"),
    ("def get_config():\n  return None\n", "must return a ConfigDict"),
    ("def get_config(a, b):\n  return None\n", "FILE cannot be read as a config: TypeError"),
    ("get_config = 3\n", "FILE cannot be read as a config: TypeError"),
    ("\0", "FILE cannot be read as a config: "),
    ("open('/nosuch/file')\n", "FILE cannot be read as a config: OSError"),
  ],
  ids=short,
)
def test_a_config_file_that_fails_is_one_line(tmp_path, start, source, words):
  file = tmp_path / "own.py"
  file.write_text(source)
  code, out, err = start("train", f"--config={file}", f"--workdir={tmp_path}/run")
  (line,) = err.splitlines()
  assert code == 2 and out == "" and line.startswith("error: ")
  assert words.replace("FILE", str(file)) in line
  assert not (tmp_path / "run").exists()


def test_a_config_file_that_is_a_pipe_is_refused(tmp_path, start):
  os.mkfifo(tmp_path / "own.py")
  code, _, err = start("train", f"--config={tmp_path}/own.py", f"--workdir={tmp_path}/run")
  assert code == 2 and "own.py' is not a regular file" in err


@pytest.mark.parametrize("value", ["~nosuchuser/x", "a" * 5000], ids=short)
def test_a_path_that_no_system_has_is_refused(tmp_path, start, value):
  arguments = [f"--config.{key}={value}" for key in ("data.path",)]
  code, _, err = start("train", "--config=configs/arithmetic.py", "--workdir=/x", *arguments)
  assert code == 2 and err.startswith("error: config key data.path is ") and len(err) < 6000
  assert len(err.splitlines()) == 1


@pytest.mark.parametrize("name", ["train", "sample"])
def test_help_is_no_error(start, name):
  code, out, _ = start(name, "--help")
  assert code == 0 and "--config" in out


@pytest.mark.parametrize(
  "flag",
  [
    "--temperature=nan",
    "--temperature=inf",
    "--temperature=1e9",
    "--temperature=-1",
    "--temperature=1e-40",
    "--n=0",
    "--n=1000000000",
    "--max_tokens=0",
    f"--max_tokens={BEYOND}",
    f"--seed={BEYOND}",
    "--step=-1",
  ],
)
def test_a_flag_of_sample_out_of_its_range_is_named(tmp_path, start, flag):
  code, out, err = start("sample", f"--workdir={tmp_path}", "--prompt=1+1=", flag)
  name = flag.partition("=")[0]
  assert code == 2 and out == "" and err.startswith(f"error: flag {name} is ")
  assert len(err.splitlines()) == 1
