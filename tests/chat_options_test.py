"""data.chat_template_kwargs: what the chat template gets beside the messages."""

import json

import numpy as np
import pytest
from small_qwen import TEMPLATE, make_checkpoint, problems
from small_run import small_config, small_run, with_section

from grpo_jax.around.trl_fields import FIELDS
from grpo_jax.console import show_data
from grpo_jax.data.loader import prompt_batch
from grpo_jax.data.tokenizers.chat import options_of
from grpo_jax.rewards import Caller, resolve
from grpo_jax.settings import ConfigError

OPENS = "{% if add_generation_prompt and deep is defined %}<think>\n{% endif %}"
THINKS = (
  OPENS + "{% if add_generation_prompt and not (enable_thinking | default(true)) %}<no>{% endif %}"
)


def chat_run(folder, *entries):
  rows = list(problems(6))
  make_checkpoint(folder / "model", [row["question"] + row["answer"] for row in rows])
  file = folder / "model" / "tokenizer_config.json"
  file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE + THINKS}))
  for split in ("train", "test"):
    (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
  config = with_section(small_config(), "model", path=str(folder / "model"))
  data = dict(task="gsm8k", path=str(folder), chat=True, max_prompt_tokens=200)
  return small_run(with_section(config, "data", chat_template_kwargs=entries, **data))


def test_the_template_gets_them(tmp_path):
  for entries, end in ((), "assistant\n"), (("enable_thinking=False",), "assistant\n<no>"):
    folder = tmp_path / str(len(entries))
    folder.mkdir()
    run = chat_run(folder, *entries)
    assert run.prompts("train").make([0])[0].text.endswith(end)
    found = show_data.drawn(run.config, 1)  # what `python -m grpo_jax.data` shows
    assert found.prompts.make([0])[0].text.endswith(end)


def test_rewards_of_the_form_know_that_the_template_opens_the_reasoning(tmp_path):
  (tmp_path / "deep").mkdir()
  (tmp_path / "plain").mkdir()
  texts = ["so </think> 3", "<think> so </think> 3", "3"]
  for name, entries, expected in (("deep", ("deep=1",), [1, 0, 0]), ("plain", (), [0, 1, 0])):
    prompts = chat_run(tmp_path / name, *entries).prompts("train")
    columns = prompt_batch(prompts, np.zeros(3, int)).columns | {"completions": texts}
    caller = Caller(None)
    form = resolve("think_format", "reward.functions", lambda name: False)
    steps = caller.start([form], columns, 1, 3)[0].result().steps
    assert [reward for ((_, reward),) in steps] == expected


def test_values_are_plain():
  entries = ("enable_thinking=False", "effort='low, or high'", "n=[1, 2.5]")
  assert options_of(entries) == {
    "enable_thinking": False,
    "effort": "low, or high",
    "n": [1, 2.5],
  }
  assert options_of(()) == {}


@pytest.mark.parametrize(
  "entries, words",
  [
    (("enable_thinking",), "write parameters as"),
    (("a=b",), "write parameters as"),
    (("tools=[1]",), "gets tools from the run"),
    (("a=b'x'",), "JSON does not have"),
    (("a=1", "a=2"), "write parameters as"),
  ],
)
def test_wrong_ones_are_refused(entries, words):
  with pytest.raises(ConfigError, match=f"data.chat_template_kwargs.*{words}") as caught:
    options_of(entries)
  assert "\n" not in str(caught.value)


def test_they_need_a_chat():
  config = with_section(small_config(), "data", chat_template_kwargs=("a=1",))
  with pytest.raises(ConfigError, match="data.chat_template_kwargs .*set data.chat=True"):
    small_run(config)


def test_the_option_of_trl_becomes_ours():
  become = FIELDS["chat_template_kwargs"].become
  found = become(None, {"enable_thinking": False, "effort": "low"})
  assert found == {"data.chat_template_kwargs": ("enable_thinking=False", "effort='low'")}
  assert options_of(found["data.chat_template_kwargs"])["effort"] == "low"
