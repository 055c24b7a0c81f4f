"""Token ids are those of transformers, for plain texts and for conversations.

tests/golden/make_tokenizers.py made the tokenizers and wrote down what transformers returned.
"""

import hashlib
import json
import os
from pathlib import Path
import re
import shutil

import pytest

from grpo_jax import model
from grpo_jax.data.tokenizers import tokenizer
from grpo_jax.settings import ConfigError

FOLDER = Path(__file__).parent / "golden/tokenizers"
PREFIX = {
  "qwen": "",
  "llama3": "<|begin_of_text|>",
  "llama2": "<s>",
  "llama2_json": "<s>",
  "gemma": "<bos>",
  "phi": "",
}
STOPS = {
  "qwen": "<|im_end|><|endoftext|>",
  "llama3": "<|eot_id|>",
  "llama2": "</s>",
  "llama2_json": "</s>",
  "gemma": "<eos><end_of_turn>",
  "phi": "<|endoftext|>",
}
GSM8K = (
  Path(os.environ.get("GSM8K_DIR", Path(__file__).parents[2] / "shared/data/gsm8k")) / "test.jsonl"
)
SPACE_FIRST = ("llama2", "llama2_json", "phi")  # families that put a space before a text


@pytest.fixture(scope="module", params=PREFIX)
def family(request):
  folder = FOLDER / request.param
  return request.param, tokenizer.load(folder), json.loads((folder / "expected.json").read_text())


def test_plain_texts(family):
  _, ours, expected = family
  texts = [case["text"] for case in expected["texts"]]
  assert len(texts) > 30
  assert ours.encode_batch(texts) == [case["ids"] for case in expected["texts"]]


def test_prompts_get_the_prefix_and_no_end_token(family):
  name, ours, expected = family
  for case in expected["texts"]:
    expected_ids = case["prompt_ids"]
    if name == "phi":
      expected_ids = expected_ids[:-1]  # phi's post-processor adds </s>
    assert [*ours.prefix_ids, *case["ids"]] == expected_ids
  assert list(ours.prefix_ids) == ours.encode(PREFIX[name])
  assert len(ours.prefix_ids) == bool(PREFIX[name])
  assert list(ours.stop_ids) == ours.encode(STOPS[name])
  assert len(ours.stop_ids) == STOPS[name].count(">")


def test_conversations(family):
  name, ours, expected = family
  refused = [case for case in expected["chats"] if "error" in case]
  assert len(expected["chats"]) == 14 and len(refused) == (4 if name == "gemma" else 0)
  for case in expected["chats"]:
    messages, generation_prompt = case["messages"], case["generation_prompt"]
    if "error" in case:
      with pytest.raises(ConfigError, match="tokenizer_config.json .*" + case["error"]):
        ours.render(messages, generation_prompt)
    else:
      assert ours.render(messages, generation_prompt) == case["text"]
      assert ours.encode(case["text"]) == case["ids"]


def test_completions_are_encoded_and_decoded_without_an_added_space(family):
  name, ours, expected = family
  for case in expected["texts"]:
    text = case["text"]
    # These texts do not survive a round trip: special tokens are not decoded, ▁ becomes a space,
    # qwen composes accents, and no space is put before an added token.
    if any(c in text for c in "<▁\u0301") or text.startswith("[note]"):
      continue
    assert ours.decode(ours.encode_batch_after([text])[0]) == text
    # Except for phi, `transformers` puts no space before a text that begins with one.
    begins_with_space = name != "phi" and text.startswith(" ")
    space_added = name in SPACE_FIRST and text and not begins_with_space
    assert ours.decode(case["ids"]) == (" " if space_added else "") + text
  # Wherever the token ids are cut in two, the two decoded parts are together the whole text.
  ids = ours.encode_batch_after(["Ann's 3 boxes:  π é\n 北 🦜 #### 72"])[0]
  for cut in range(len(ids)):
    parts = ours.decode(ids[:cut]), ours.decode(ids[cut:])
    if "\ufffd" not in parts[0] + parts[1]:  # the cut is not within a character
      assert "".join(parts) == ours.decode(ids)


@pytest.mark.skipif(not GSM8K.is_file(), reason="no GSM8K text: set GSM8K_DIR")
@pytest.mark.parametrize(
  "family",
  [pytest.param(x, marks=() if x == "qwen" else pytest.mark.slow) for x in PREFIX],
  indirect=True,
)
def test_gsm8k(family):
  """Compares hashes of the token ids of GSM8K's 1,319 test problems."""
  name, ours, _ = family
  rows = [json.loads(line) for line in GSM8K.open(encoding="utf-8")]
  expected = json.loads((FOLDER / "gsm8k.json").read_text())[name]
  texts = [row[key] for row in rows for key in ("question", "answer")]
  system = [{"role": "system", "content": "Think first."}] * (name != "gemma")
  prompts = [[*system, {"role": "user", "content": row["question"]}] for row in rows]
  answered = [
    [*chat, {"role": "assistant", "content": row["answer"]}] for chat, row in zip(prompts, rows)
  ]
  found = {
    "plain": texts,
    "chat, prompt": [ours.render(chat) for chat in prompts],
    "chat, answered": [ours.render(chat, generation_prompt=False) for chat in answered],
  }
  for kind, kind_texts in found.items():
    ids = json.dumps(ours.encode_batch(kind_texts))
    assert hashlib.sha256(ids.encode()).hexdigest() == expected[kind], kind
  assert [ours.decode(ids) for ids in ours.encode_batch_after(texts)] == texts


def test_what_transformers_reads_of_a_tokenizer_of_characters():
  """The recorded files are those that we write, so the recorded ids are those of our folders."""
  folder = FOLDER / "characters"
  expected = json.loads((folder / "expected.json").read_text())
  ours = tokenizer.characters(expected["alphabet"])
  assert {name: json.loads(content) for name, content in ours.files.items()} == {
    name: json.loads((folder / name).read_bytes()) for name in ours.files
  }
  assert expected["texts"][0]["ids"] == [*range(2, 2 + len(expected["alphabet"]))]
  for case in expected["texts"]:
    assert ours.encode(case["text"]) == case["ids"]
    assert case["decoded"] == case["text"]
    assert ours.decode(case["ids"]) == re.sub("<eos>|<pad>", "", case["text"])


# The models of golden/ with whose config.json the tokenizer of each family occurs.
MODELS = {
  "qwen": ("qwen2_tied", "families/qwen3", "families/qwen3_moe"),
  "llama3": ("families/llama3",),
  "llama2": ("families/llama",),
  "llama2_json": ("families/llama", "families/mistral"),
  "gemma": ("families/gemma2", "families/gemma3"),
  "phi": ("families/phi3",),
  "characters": (
    "qwen2_tied",
    "families/qwen3",
    "families/qwen3_moe",
    "families/llama",
    "families/mistral",
    "families/phi3",
    "families/gemma2",
    "families/gemma3",
  ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
  "name, model_name", [(name, one) for name, models in MODELS.items() for one in models]
)
def test_transformers_reads_an_exported_folder_as_we_do(name, model_name, tmp_path):
  """AutoTokenizer gives the same ids for the folder that was loaded, for ours, and as we do."""
  transformers = pytest.importorskip("transformers")
  source, out = tmp_path / "source", tmp_path / "out"
  shutil.copytree(FOLDER / name, source)
  shutil.copy(FOLDER.parent / model_name / "config.json", source)
  model.save(out, *model.load(FOLDER.parent / model_name))
  ours = tokenizer.load(source)
  ours.save(out)
  texts = [case["text"] for case in json.loads((source / "expected.json").read_text())["texts"]]
  if name != "characters":
    texts += [
      f" {c}{c}1{c} {c}  a{c}" for c in map(chr, (*range(32, 0x250), *range(0x2010, 0x2070)))
    ]
  before, after = (transformers.AutoTokenizer.from_pretrained(path) for path in (source, out))
  assert type(before) is type(after)
  ids = after(texts, add_special_tokens=False)["input_ids"]
  assert ids == before(texts, add_special_tokens=False)["input_ids"]
  different = [text for text, a, b in zip(texts, ids, ours.encode_batch(texts)) if a != b]
  assert not different, (len(different), len(texts))
  if name == "characters":
    assert after.batch_decode(ids) == texts
