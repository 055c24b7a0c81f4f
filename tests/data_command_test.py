"""`python -m grpo_jax.data`: the prompts of a step, and statistics of a data set."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from small_run import small_config, with_section

from grpo_jax.config import Config, Data
from grpo_jax.console import show_data, text
from grpo_jax.data import loader
from grpo_jax.data.statistics import Statistics, duplicates, histogram, overlap, statistics
from grpo_jax.data.tokenizers import tokenizer
from grpo_jax.settings import ConfigError

ROOT = Path(__file__).parents[1]
TOKENIZER = tokenizer.characters("abcdefgh")


def of_lengths(lengths):
  """Statistics of prompts that are equal where their lengths are."""
  lengths = np.array(lengths, np.int32)
  return Statistics(lengths, lengths * 0, lengths.astype(np.uint64))


def test_statistics_of_examples():
  questions = ["ab", "abc", "ab", "h" * 70, "ab"]
  examples = [{"question": text, "solution": text * 2} for text in questions]
  examples[3]["solution"] = None
  found = statistics(examples, TOKENIZER, Data(max_prompt_tokens=3))
  assert found.prompt_tokens.tolist() == [2, 3, 2, 70, 2]
  assert found.solution_tokens.tolist() == [5, 7, 5, 0, 5]  # with the token that ends it
  assert duplicates(found) == (1, 2)
  test = statistics([{"question": "abc"}, {"question": "abcd"}], TOKENIZER, Data())
  assert overlap(found, test).tolist() == [0]
  assert test.solution_tokens.tolist() == [0, 0]


def test_statistics_say_how_many_rows_have_each_column(start, tmp_path):
  rows = [{"question": "a", "answer": "1"} for _ in range(5)]
  rows[3] |= {"hint": "b"}
  rows[4] |= {"image": "x.png", "answer": None}
  for split in ("train", "test"):
    (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
  flags = ["--config=configs/default.py", "--config.data.task=columns", "--stats"]
  flags += [f"--config.data.path={tmp_path}", "--config.data.max_prompt_tokens=40"]
  code, out, err = start("data", *flags)
  assert code == 0, err
  assert out.count("examples that have each column: question 5, answer 4, hint 1, image 1\n") == 2


def test_parts_of_a_large_split_are_put_together(monkeypatch):
  examples = [{"question": "a" * (1 + i % 7)} for i in range(50)]
  whole = statistics(examples, TOKENIZER, Data())
  monkeypatch.setattr("grpo_jax.data.statistics._AT_ONCE", 8)
  parts = statistics(examples, TOKENIZER, Data())
  assert parts.prompt_tokens.tolist() == [1 + i % 7 for i in range(50)]
  np.testing.assert_array_equal(parts.prompt_hashes, whole.prompt_hashes)


def test_a_histogram():
  lengths = np.array([3] * 80 + [19] * 20 + [100])
  assert histogram(lengths) == [
    "           0-19        100  ########################################",
    "          20-39          0",
    "          40-59          0",
    "          60-79          0",
    "          80-99          0",
    "        100-119          1  #",
    "  half have at most 3, 95% at most 19, the longest has 100",
  ]
  assert histogram(np.array([8, 9]))[:2] == [
    "              8          1  ########################################",
    "              9          1  ########################################",
  ]


OPENING = """
class Opening:
  def reset(self, example):
    return [{"role": "user", "content": f"From {example['seed']}?"}]

  def step(self, message):
    return [], None, True
"""


def test_the_openings_of_an_environment_are_shown(tmp_path):
  (tmp_path / "env.py").write_text(OPENING)
  config = with_section(small_config(), "data", task="seeds", prompt="", max_prompt_tokens=32)
  config = with_section(config, "environment", name=f"{tmp_path}/env.py:Opening")
  found = show_data.drawn(config, 1)
  (prompt,) = found.prompts.make(found.indices[:1])
  assert prompt.text == f"From {prompt.example['seed']}?"
  assert any(prompt.text in line for line in show_data.step_lines(found, 2, 100))
  assert any("duplicates: 0" in line for line in show_data.statistics_lines(config))


def test_the_prompts_of_a_step():
  config = with_section(small_config(), "warm_start", steps=10, batch=6)
  config = dataclasses.replace(config, steps=100)
  size = 20_000
  warm = show_data.drawn(config, 10)
  assert (warm.phase, warm.remark) == ("warm start", "")
  assert warm.indices == loader.step_indices(config.seed, 9, 6, size).tolist()
  first = show_data.drawn(config, 11)
  prompts = config.batch.prompts
  assert (first.phase, first.remark) == ("GRPO", "")
  assert first.indices == loader.step_indices(config.seed, 0, prompts, size).tolist()
  sampling = with_section(config, "algo", dynamic_sampling=True, max_resample_rounds=3)
  later = show_data.drawn(sampling, 13)
  assert later.remark == ", and later ones once rewards were all equal"
  assert later.indices == loader.step_indices(config.seed, 2, prompts, size).tolist()
  for step in (0, 111):
    with pytest.raises(ConfigError, match=f"--step={step}: the run has the steps 1 to 110"):
      show_data.drawn(config, step)


def test_the_lines_of_a_step_fit_a_screen():
  config = with_section(small_config(), "batch", prompts=32)
  found = show_data.drawn(config, 1)
  lines = list(show_data.step_lines(found, 12, 80))
  made = found.prompts.make(found.indices)
  assert len(lines) <= 24 and max(map(len, lines)) <= 80
  assert lines[0].startswith("GRPO: 32 of 20,000 prompts; ")
  assert lines[2].split() == [str(found.indices[0]), str(len(made[0].ids)), made[0].text]
  assert lines[14].strip() == "and 20 more (--prompts=32)"
  assert f"ids: {' '.join(map(str, made[0].ids))}" in lines
  assert f"answer: {made[0].example['answer']}" in lines


@pytest.fixture
def mixture(tmp_path):
  """The config of a mixture of three rows and one row."""
  for name, rows in (("a", ["ab", "abc", "ab"]), ("b", ["a" * 9])):
    (tmp_path / name).mkdir()
    text = "".join(json.dumps({"problem": row, "answer": "1"}) + "\n" for row in rows)
    for split in ("train", "test"):
      (tmp_path / name / f"{split}.jsonl").write_text(text)
  sources = tuple(f"{name}=math:{tmp_path / name}" for name in "ab")
  return with_section(small_config(), "data", mixture=sources)


def test_the_prompts_of_a_mixture_say_their_source(mixture):
  found = show_data.drawn(mixture, 1)  # 4 prompts, so each of them once
  lines = list(show_data.step_lines(found, 8, 80))
  names = [prompt.example["task"] for prompt in found.prompts.make(found.indices)]
  assert lines[1] == "of a: 3, b: 1"
  assert lines[2] == "    index  tokens  task  prompt"
  assert [line.split()[2] for line in lines[3:7]] == names and sorted(names) == list("aaab")
  assert {line[25:] for line in lines[3:7]} == {"ab", "abc", "a" * 9}


def test_statistics_of_a_mixture_are_those_of_each_source(mixture):
  lines = list(show_data.statistics_lines(with_section(mixture, "data", weights=(1.0, 999.0))))
  a = "a: 3 examples{}; prompts: half have at most 2, 95% at most 3, the longest has 3"
  b = "b: 1 examples{}; prompts: half have at most 9, 95% at most 9, the longest has 9"
  assert lines[0] == "training: 4 examples, all readable"
  assert [line.strip() for line in lines[1:3]] == [
    a.format(", 0.1% of an epoch"),
    b.format(", 99.9% of an epoch"),
  ]
  # A prompt that the weights repeat is no duplicate.
  assert "duplicates: 1 prompts occur more than once, in 1 more examples" in lines
  test = lines.index("test: 4 examples, all readable")
  assert [line.strip() for line in lines[test + 1 : test + 3]] == [a.format(""), b.format("")]


def test_what_all_prompts_share_is_left_out_of_a_list():
  opening, closing = "You are a helpful assistant. ", " Think step by step."
  texts = [f"{opening}{question}{closing}" for question in ("2+2?", "13-5?")]
  assert text.without_common_parts(texts) == ["… 2+2 …", "… 13-5 …"]
  assert text.without_common_parts(["2+2", "2-2"]) == ["2+2", "2-2"]
  assert text.without_common_parts(texts[:1]) == texts[:1]


@pytest.mark.usefixtures("own_tables")
def test_the_config_may_have_names_that_its_plugins_register(start, tmp_path):
  plugin = tmp_path / "plugin.py"
  plugin.write_text(
    "import grpo_jax\n"
    "@grpo_jax.register_task\n"
    "def task_of_a_plugin(path):\n"
    "  rows = [{'question': text} for text in ('ab', 'ba', 'aa', 'bb')]\n"
    "  return grpo_jax.Task(rows, rows, 'ab')\n"
    "@grpo_jax.register_advantage\n"
    "def advantage_of_a_plugin(rewards, mask_PGT, algo):\n"
    "  return rewards.total_PG\n"
  )
  flags = ["--config=configs/default.py", f"--config.plugins=('{plugin}',)", "--step=1"]
  flags += ["--config.data.task=task_of_a_plugin", "--config.batch.prompts=4"]
  flags += ["--config.algo.advantage=advantage_of_a_plugin"]
  code, out, err = start("data", *flags)
  assert code == 0, err
  assert "4 of 4 prompts" in out


def test_statistics_name_a_bad_row_of_a_large_file(start, tmp_path):
  rows = [json.dumps({"problem": f"a{i}", "answer": "1"}) for i in range(900)]
  rows[700] = '{"problem": "a"}'
  (tmp_path / "train.jsonl").write_text("\n".join(rows))
  (tmp_path / "test.jsonl").write_text(rows[0])
  flags = ["--config=configs/default.py", "--config.data.task=math"]
  flags += [f"--config.data.path={tmp_path}", "--config.data.count_at_start=100", "--stats"]
  flags += [f"--config.data.tokenizer={ROOT / 'tests/golden/tokenizers/qwen'}"]
  code, _, err = start("data", *flags)
  assert code == 2, err
  assert err.count("\n") == 1
  assert "train.jsonl line 701 has no text field 'answer'" in err


def test_prompts_with_images_are_counted_with_their_tokens(tmp_path):
  """The image processor of the model's folder says how many tokens an image has."""
  folder = Path(__file__).parent / "golden/images/qwen3_vl"
  row = {"question": "What is it?", "answer": "a cat"}
  for split, file in (("train", "small.png"), ("test", "rgb.png")):
    other = row | {"image": str(folder.parent / "files" / file)}
    (tmp_path / f"{split}.jsonl").write_text(json.dumps(other) + "\n")
  config = with_section(Config(), "model", path=str(folder))
  config = with_section(
    config, "data", task="columns", path=str(tmp_path), chat=True, max_prompt_tokens=500
  )
  found = show_data.drawn(config, config.warm_start.steps + 1)
  (prompt,) = found.prompts.make([0])
  assert prompt.layouts[0].tokens == ((3, 3),)  # 8192 pixels at least, in squares of 32 x 32
  assert prompt.text.count("<|image_pad|>") == 1
  assert any("overlap: 0" in line for line in show_data.statistics_lines(config))


@pytest.mark.parametrize("is_column", [False, True])
@pytest.mark.parametrize("before", [1, 120])
def test_images_are_seen_though_the_first_rows_have_none(tmp_path, before, is_column):
  folder = Path(__file__).parent / "golden/images/qwen3_vl"
  file = str(folder.parent / "files/small.png")
  image = [] if is_column else [{"type": "image", "image": file}]
  parts = [[{"type": "text", "text": "What?"}, *images] for images in (*[[]] * before, image)]
  rows = [{"question": [{"role": "user", "content": x}], "answer": "a cat"} for x in parts]
  rows[-1] |= {"image": file} if is_column else {}
  (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
  config = with_section(Config(), "model", path=str(folder))
  config = with_section(
    config, "data", task="columns", path=str(tmp_path), chat=True, max_prompt_tokens=500
  )
  found = show_data.drawn(config, config.warm_start.steps + 1).prompts.make([0, before])
  assert [len(prompt.images) for prompt in found] == [0, 1]


def test_a_row_is_shown_with_its_images_as_the_file_has_them(tmp_path):
  folder = Path(__file__).parent / "golden/images/qwen3_vl"
  row = {"question": "What?", "answer": "a cat", "image": str(folder.parent / "files/small.png")}
  (tmp_path / "train.jsonl").write_text(json.dumps(row))
  config = with_section(Config(), "model", path=str(folder))
  config = with_section(
    config, "data", task="columns", path=str(tmp_path), chat=True, max_prompt_tokens=500
  )
  found = show_data.drawn(config, config.warm_start.steps + 1)
  assert f"image: {row['image']}" in [*show_data.step_lines(found, 1, 100)]
