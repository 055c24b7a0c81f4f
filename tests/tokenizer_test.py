import dataclasses
import io
import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
import pytest
import sentencepiece
import tokenizers

from grpo_jax.data.tokenizers import tokenizer
from grpo_jax.settings import ConfigError

ALPHABET = "0123456789+-=;# \né√"
TEXTS = [
  "7+15=22;#### 22",
  "two  spaces and\na line",
  "naïve café, 北京 and 🦜!",
  "3/4 = 0.75 <b>",
  "x",
]
CHARACTERS = tokenizer.characters(ALPHABET)
GOLDEN = Path(__file__).parent / "golden/tokenizers"


def byte_level(folder, **files):
  """Makes a folder with a byte-level BPE tokenizer, as Hugging Face writes it.

  It has two special tokens, and truncation and padding are switched on. `files` are JSON files to
  put beside it, without their suffix.
  """
  engine = tokenizers.Tokenizer(tokenizers.models.BPE())
  engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  engine.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=300,
    special_tokens=["<|end|>", "<|im_end|>"],
    show_progress=False,
    initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
  )
  engine.train_from_iterator(TEXTS * 3, trainer)
  engine.post_processor = tokenizers.processors.TemplateProcessing(
    single="<|end|> $A", special_tokens=[("<|end|>", 0)]
  )
  engine.enable_truncation(3)
  engine.enable_padding(length=20)
  folder.mkdir(exist_ok=True)
  engine.save(str(folder / "tokenizer.json"))
  for name, value in files.items():
    (folder / f"{name}.json").write_text(json.dumps(value))
  return folder


def train_sentencepiece(path, **options):
  """Writes a small tokenizer.model to `path`."""
  out = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(TEXTS * 5),
    model_writer=out,
    byte_fallback=True,
    normalization_rule_name="identity",
    remove_extra_whitespaces=False,
    minloglevel=2,
    pad_id=3,
    **options,
  )
  path.write_bytes(out.getvalue())
  return path


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
  path = tmp_path_factory.mktemp("pieces") / "tokenizer.model"
  return train_sentencepiece(path, vocab_size=320, model_type="bpe")


def contents(folder):
  """The contents of all files in a folder by their relative paths."""
  return {
    str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()
  }


def test_characters_have_the_ids_of_their_positions():
  made = tokenizer.characters("ab \na")
  assert (made.vocab_size, made.pad_id, made.stop_ids) == (6, 0, (1,))
  assert made.encode("ba \n a") == [3, 2, 4, 5, 4, 2]
  assert made.encode("") == []
  assert made.decode([0, 3, 2, 1, 4, 4, 5, 0, 999]) == "ba  \n"
  with pytest.raises(dataclasses.FrozenInstanceError):
    made.pad_id = 3


@given(st.text(ALPHABET, max_size=40))
def test_characters_round_trip(text):
  ids = CHARACTERS.encode(text)
  assert len(ids) == len(text) and CHARACTERS.decode(ids) == text
  assert CHARACTERS.decode([*ids, 1, 0, 0]) == text


def test_a_character_outside_the_alphabet_is_named(tmp_path):
  CHARACTERS.save(tmp_path)
  for made in (CHARACTERS, tokenizer.load(tmp_path)):
    with pytest.raises(ConfigError, match="the character 'Q' is not in the vocabulary"):
      made.encode("1+1Q")
    with pytest.raises(ConfigError, match="'Q'"):
      made.encode_batch(["1", "Q"])


def test_characters_saved_and_loaded_are_the_same(tmp_path):
  CHARACTERS.save(tmp_path / "new/folder")
  loaded = tokenizer.load(tmp_path / "new/folder").for_model(CHARACTERS.vocab_size, "the model")
  assert loaded.encode(ALPHABET) == CHARACTERS.encode(ALPHABET) == list(range(2, 2 + len(ALPHABET)))
  assert loaded.decode(range(loaded.vocab_size)) == ALPHABET
  for name in ("vocab_size", "stop_ids", "pad_id", "files"):
    assert getattr(loaded, name) == getattr(CHARACTERS, name)
  config = json.loads((tmp_path / "new/folder/tokenizer_config.json").read_text())
  assert config["tokenizer_class"] == "PreTrainedTokenizerFast" and config["eos_token"] == "<eos>"


def test_characters_that_an_earlier_version_saved_keep_their_ids():
  loaded = tokenizer.load(GOLDEN / "words")
  alphabet = "0123456789+-=;# "
  assert loaded.encode(alphabet + "<eos>") == [*range(2, 18), 1]
  assert (loaded.vocab_size, loaded.stop_ids, loaded.pad_id) == (18, (1,), 0)
  assert loaded.decode([*range(18), 1]) == alphabet
  with pytest.raises(ConfigError, match="the character 'Q' is not in the vocabulary"):
    loaded.encode("1Q")


@pytest.mark.parametrize("character", "è©Ω")  # the first two have bytes of é and ¨ alone
def test_a_character_that_shares_bytes_with_the_alphabet_is_refused(character, tmp_path):
  made = tokenizer.characters("é¨x")
  made.save(tmp_path)
  for tested in (made, tokenizer.load(tmp_path).for_model(5, "the model")):
    assert (tested.vocab_size, tested.encode("éx¨<eos>")) == (5, [2, 4, 3, 1])
    with pytest.raises(ConfigError, match=f"the character '{character}' is not in the vocabulary"):
      tested.encode(f"x{character}x")


def test_a_bpe_without_a_token_for_unknown_characters_names_them(tmp_path):
  """The tokenizers library leaves such characters out."""
  engine = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
  engine.normalizer = tokenizers.normalizers.Lowercase()
  engine.add_tokens(["[note]"])
  engine.save(str(tmp_path / "tokenizer.json"))
  loaded = tokenizer.load(tmp_path)
  assert loaded.encode("AB[note]b") == [2, 3, 1]
  with pytest.raises(ConfigError, match="the character 'o' is not in the vocabulary"):
    loaded.encode_batch(["ab[note]", "abo"])


# Ids that a model lacks.


def test_a_special_token_beyond_the_model_may_not_occur_in_a_text(tmp_path):
  special = {"eos_token": "<|end|>", "pad_token": "<|im_end|>"}
  folder = byte_level(tmp_path / "hf", tokenizer_config=special)
  engine = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
  size = engine.get_vocab_size()
  engine.add_special_tokens(["<|endoftext|>"])
  engine.save(str(folder / "tokenizer.json"))
  (folder / "tokenizer_config.json").write_text(
    json.dumps(special | {"pad_token": "<|endoftext|>"})
  )
  loaded = tokenizer.load(folder)
  assert (loaded.vocab_size, loaded.pad_id) == (size + 1, size)
  fitting = loaded.for_model(size, "the model")
  assert (fitting.vocab_size, fitting.pad_id, fitting.stop_ids) == (size, 0, (0,))
  assert fitting.encode_batch(TEXTS) == loaded.encode_batch(TEXTS)
  assert loaded.encode("x<|endoftext|>")[-1] == size
  for encode in (fitting.encode_batch, fitting.encode_batch_after):
    with pytest.raises(ConfigError, match=r"a token of 'x<\|endoftext\|>' is not in .* the model"):
      encode(["x", "x<|endoftext|>"])
  larger = loaded.for_model(size + 9, "the model")
  assert (larger.vocab_size, larger.pad_id) == (size + 1, size)


def test_a_tokenizer_that_does_not_fit_a_model_is_refused(tmp_path):
  loaded = tokenizer.load(byte_level(tmp_path / "hf", tokenizer_config={"eos_token": "<|im_end|>"}))
  # An ordinary token beyond the model, then the one that ends a text.
  for size in (loaded.vocab_size - 1, 1):
    message = f"^KEY: a tokenizer of {loaded.vocab_size} ids does not fit MODEL, which has {size}$"
    with pytest.raises(ConfigError, match=message):
      loaded.for_model(size, "MODEL", "KEY")
  only_special = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
  only_special.add_special_tokens(["<eos>"])
  only_special.save(str(tmp_path / "tokenizer.json"))
  (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
  with pytest.raises(ConfigError, match="of 2 ids does not fit the model, which has 1"):
    tokenizer.load(tmp_path).for_model(1, "the model")


def test_tokenizer_json(tmp_path):
  special = {"eos_token": "<|im_end|>", "pad_token": {"content": "<|end|>"}}
  folder = byte_level(tmp_path / "hf", tokenizer_config=special)
  loaded = tokenizer.load(folder)
  known = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
  known.no_truncation()
  known.no_padding()
  for text in TEXTS:
    assert loaded.encode(text) == known.encode(text, add_special_tokens=False).ids
    assert loaded.decode(loaded.encode(text)) == text
  assert loaded.encode_batch(TEXTS) == [loaded.encode(text) for text in TEXTS]
  assert len(loaded.encode(TEXTS[1])) > 3
  assert loaded.encode("<|im_end|>") == [1] and loaded.decode([1, *loaded.encode("x"), 1, 0]) == "x"
  assert (loaded.stop_ids, loaded.pad_id, loaded.vocab_size) == ((1,), 0, known.get_vocab_size())
  assert tokenizer.load(folder / "tokenizer.json").stop_ids == (1,)


@pytest.mark.parametrize(
  "files, stop_ids, pad_id",
  [
    ({"generation_config": {"eos_token_id": 1}}, (1,), 1),
    (
      {
        "generation_config": {"eos_token_id": [0, 1]},
        "tokenizer_config": {"eos_token": "<|im_end|>"},
      },
      (1, 0),
      1,
    ),
    (
      {"special_tokens_map": {"eos_token": {"content": "<|end|>"}, "pad_token": "<|im_end|>"}},
      (0,),
      1,
    ),
    ({"tokenizer_config": {"eos_token": None, "pad_token": "<|end|>"}}, (), 0),
    ({}, (), 0),
  ],
)
def test_special_ids_come_from_the_json_files(tmp_path, files, stop_ids, pad_id):
  loaded = tokenizer.load(byte_level(tmp_path / "hf", **files))
  assert (loaded.stop_ids, loaded.pad_id) == (stop_ids, pad_id)


def test_loaded_files_are_saved_unchanged(tmp_path, pieces):
  folder = byte_level(
    tmp_path / "hf",
    tokenizer_config={"eos_token": "<|end|>", "chat_template": "é"},
    config={"x": 1},
  )
  (folder / "tokenizer.model").write_bytes(pieces.read_bytes())
  (folder / "additional_chat_templates").mkdir()
  for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
    (folder / name).write_text("{{ é }}")
  expected = contents(folder)
  del expected["config.json"]  # belongs to the model
  tokenizer.load(folder).save(tmp_path / "out")
  assert contents(tmp_path / "out") == expected
  ids = tokenizer.load(tmp_path / "out").encode(TEXTS[0])
  assert ids == tokenizer.load(folder / "tokenizer.json").encode(TEXTS[0])


def test_sentencepiece(tmp_path, pieces):
  known = sentencepiece.SentencePieceProcessor(model_file=str(pieces))
  loaded = tokenizer.load(pieces.parent)
  for text in [*TEXTS, "unseen: Ωß ✓"]:
    assert loaded.encode(text) == known.encode(text)
    assert loaded.decode(loaded.encode(text)) == " " + text  # the model puts a space before a text
    assert loaded.decode(loaded.encode_batch_after([text])[0]) == text
  assert loaded.encode_batch(TEXTS) == [loaded.encode(text) for text in TEXTS]
  assert loaded.encode_batch([]) == []
  assert (loaded.vocab_size, loaded.stop_ids, loaded.pad_id) == (320, (known.eos_id(),), 3)
  ids = loaded.encode_batch_after(["x"])[0]
  assert loaded.decode([known.bos_id(), *ids, known.eos_id(), 3, 3, 320, 100_000]) == "x"
  loaded.save(tmp_path)
  assert (tmp_path / "tokenizer.model").read_bytes() == pieces.read_bytes()
  special = {"eos_token": known.id_to_piece(9), "pad_token": "absent"}
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(special))
  assert tokenizer.load(tmp_path / "tokenizer.model").stop_ids == (9,)
  assert tokenizer.load(tmp_path).pad_id == 3


def test_bad_tokenizers_are_named(tmp_path):
  for path in (tmp_path, tmp_path / "absent", tmp_path / "tokenizer.json"):
    with pytest.raises(ConfigError, match=f"data.tokenizer: {path}"):
      tokenizer.load(path)
  for name in ("tokenizer.json", "tokenizer.model"):
    (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=f"{name} cannot be read"):
      tokenizer.load(tmp_path / name)
  folder = byte_level(tmp_path / "hf")
  (folder / "tokenizer_config.json").write_text("{")
  with pytest.raises(ConfigError, match="tokenizer_config.json beside the tokenizer is not JSON"):
    tokenizer.load(folder)


# Prefixes, and special tokens inside a text.


@pytest.mark.parametrize(
  "config, prefix",
  [
    ({}, (0,)),  # the post-processor of tokenizer.json decides
    ({"bos_token": "<|im_end|>"}, (0,)),
    ({"bos_token": "<|im_end|>", "add_bos_token": True}, (1,)),
    ({"bos_token": "<|end|>", "add_bos_token": False}, ()),
    ({"bos_token": "<|end|>", "add_eos_token": True}, ()),
    ({"bos_token": None, "add_bos_token": True}, ()),
  ],
)
def test_the_prefix_of_a_prompt(tmp_path, pieces, config, prefix):
  assert tokenizer.load(byte_level(tmp_path / "hf", tokenizer_config=config)).prefix_ids == prefix
  (tmp_path / "tokenizer.model").write_bytes(pieces.read_bytes())
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<s>"}))
  assert tokenizer.load(tmp_path).prefix_ids == ((1,) if config.get("add_bos_token") else ())


@pytest.mark.parametrize(
  "options",
  [
    dict(model_type="unigram", vocab_size=300),
    dict(model_type="bpe", vocab_size=310, add_dummy_prefix=False),
  ],
  ids=str,
)
def test_other_kinds_of_sentencepiece_models(tmp_path, options):
  path = train_sentencepiece(tmp_path / "tokenizer.model", **options)
  known = sentencepiece.SentencePieceProcessor(model_file=str(path))
  loaded = tokenizer.load(tmp_path)
  for text in [*TEXTS, "unseen: Ωß ✓"]:
    assert loaded.encode(text) == known.encode(text)
    assert loaded.decode(loaded.encode_batch_after([text])[0]) == text


@pytest.mark.parametrize(
  "config, decoded",
  [
    ({}, "[word]"),
    ({"additional_special_tokens": ["[word]"]}, ""),
    ({"extra_special_tokens": [{"content": "[word]"}]}, ""),
    ({"extra_special_tokens": {"word_token": "[word]"}}, ""),
  ],
)
def test_an_added_token_is_special_only_if_the_config_names_it(tmp_path, pieces, config, decoded):
  """As transformers 4.57 and 5.24 decode it."""
  (tmp_path / "tokenizer.model").write_bytes(pieces.read_bytes())
  (tmp_path / "added_tokens.json").write_text(json.dumps({"[word]": 320}))
  (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"} | config))
  assert tokenizer.load(tmp_path).decode([320]) == decoded


def test_special_tokens_beyond_a_sentencepiece_model(tmp_path, pieces):
  (tmp_path / "tokenizer.model").write_bytes(pieces.read_bytes())
  (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": 320}))
  config = {
    "eos_token": "<|im_end|>",
    "added_tokens_decoder": {
      "321": {"content": "[word]", "special": False},
      "325": {"content": "<|user|>", "rstrip": True},
    },
  }
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
  loaded = tokenizer.load(tmp_path)
  known = sentencepiece.SentencePieceProcessor(model_file=str(pieces))
  assert (loaded.vocab_size, loaded.stop_ids) == (326, (320,))

  def after(text):
    """Token ids of `text` without a space before it. No piece begins with "=" but "=" itself."""
    return known.encode("=" + text)[len(known.encode("=")) :]

  assert loaded.encode("x<|im_end|>7+[word] b<|user|> \n x</s>") == [
    *known.encode("x"),
    320,
    *after("7+"),
    321,
    *after(" b"),
    325,
    *after("x"),
    2,
  ]
  assert loaded.decode([*after("7+"), 321, 320, *after(" b"), 325, 2, 322]) == "7+[word] b"
  (tmp_path / "tokenizer_config.json").write_text(json.dumps({"legacy": True}))
  # With legacy, a part after a special token begins with a space, as a whole text does.
  assert tokenizer.load(tmp_path).encode("</s>x") == [2, *known.encode("x")]


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_spaces_of_a_metaspace_tokenizer(tmp_path, scheme):
  engine = tokenizers.Tokenizer(tokenizers.models.BPE())
  engine.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=scheme)
  engine.decoder = tokenizers.decoders.Metaspace(prepend_scheme=scheme)
  engine.train_from_iterator(
    TEXTS, tokenizers.trainers.BpeTrainer(vocab_size=90, show_progress=False)
  )
  engine.save(str(tmp_path / "tokenizer.json"))
  loaded = tokenizer.load(tmp_path)
  assert engine.decode(loaded.encode("and")) == "and"
  assert loaded.decode(loaded.encode("and")) == " and"
  ids = loaded.encode("two and a line")
  assert loaded.decode(ids) == " two and a line" == "".join(loaded.decode([i]) for i in ids)
  assert loaded.decode(loaded.encode_batch_after(["and a"])[0]) == "and a"


def test_tokenizer_json_of_a_llama_tokenizer_is_used_only_for_other_models(tmp_path):
  """As in transformers, which uses it with the models of Mistral and Phi-3."""
  folder = GOLDEN / "llama2_json"
  for name in ("tokenizer.json", "tokenizer_config.json"):
    (tmp_path / name).write_bytes((folder / name).read_bytes())
  known = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
  text = "</s>x"
  assert tokenizer.load(tmp_path).encode(text) != known.encode(text, add_special_tokens=False).ids
  (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
  assert tokenizer.load(tmp_path).encode(text) != known.encode(text, add_special_tokens=False).ids
  (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
  assert tokenizer.load(tmp_path).encode(text) == known.encode(text, add_special_tokens=False).ids
  assert "config.json" not in tokenizer.load(tmp_path).files


def test_a_character_that_is_split_into_several_tokens(pieces):
  loaded = tokenizer.load(pieces)
  ids = loaded.encode_batch_after(["é✓"])[0]  # é is a piece, ✓ is three bytes
  assert [loaded.decode(ids[:n]) for n in range(1, 5)] == ["é", "é\ufffd", "é\ufffd\ufffd", "é✓"]


# Chat templates.


def with_template(folder, template, **files):
  """A tokenizer with a chat template, and further JSON files beside it."""
  config = {"eos_token": "<|im_end|>", "chat_template": template}
  return tokenizer.load(byte_level(folder, tokenizer_config=config, **files))


HELLO = [{"role": "user", "content": "<b> & é", "more": [1, "é"]}]


@pytest.mark.parametrize(
  "template, text",
  [
    (
      "{{ messages[0].content }}{{ eos_token }}{{ bos_token }}{{ add_generation_prompt }}",
      "<b> & é<|im_end|>True",
    ),
    (
      "{% for i in range(9) %}\n  {% if i == 2 %}{% break %}{% endif %}\n{{ i }}\n{% endfor %}",
      "0\n1\n",
    ),
    ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<b> & é", "more": [1, "é"]}'),
    ("{{ messages[0].more | tojson(indent=1) }}", '[\n 1,\n "é"\n]'),
    ("{% if tools is none %}{{ 'none' }}{% endif %}{{ strftime_now('%Y') | length }}", "none4"),
    ("{% generation %}{{ messages[0].role }}{% endgeneration %}", "user"),
  ],
)
def test_chat_templates_can_use_what_transformers_provides(tmp_path, template, text):
  assert with_template(tmp_path / "hf", template).render(HELLO) == text


@pytest.mark.parametrize(
  "template, message",
  [
    (
      "{{ ''.__class__.__mro__[1].__subclasses__() }}",
      "SecurityError: access to attribute '__class__'",
    ),
    ("{{ messages.append(1) }}", "SecurityError"),
    ("{{ raise_exception('roles must\\nalternate') }}", "roles must alternate"),
    ("{% if %}", "cannot be read: TemplateSyntaxError"),
    ("{{ messages[0].content + 1 }}", "TypeError"),
    ("{{ messages[5].content }}", "UndefinedError"),
    ("{{ range(10 ** 9) | list }}", "OverflowError: Range too big"),
  ],
)
def test_a_failing_template_is_named_in_one_line(tmp_path, template, message):
  with pytest.raises(
    ConfigError, match="^the chat template in tokenizer_config.json cannot "
  ) as error:
    with_template(tmp_path / "hf", template).render(HELLO)
  assert message in str(error.value) and "\n" not in str(error.value)


def test_where_a_chat_template_is_found(tmp_path):
  several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
  assert (
    with_template(tmp_path / "a", several, chat_template={"chat_template": "j"}).render(HELLO)
    == "d"
  )
  assert (
    with_template(tmp_path / "b", None, chat_template={"chat_template": "j"}).render(HELLO) == "j"
  )
  (tmp_path / "a/chat_template.jinja").write_text("file")
  loaded = tokenizer.load(tmp_path / "a")
  assert loaded.render(HELLO) == "file"
  loaded.save(tmp_path / "saved")
  assert tokenizer.load(tmp_path / "saved").render(HELLO) == "file"
  without_default = with_template(tmp_path / "d", several[:1])
  for made in (with_template(tmp_path / "c", None), without_default, CHARACTERS):
    with pytest.raises(ConfigError, match="no chat template .* set data.chat=False"):
      made.render(HELLO)


@pytest.mark.parametrize(
  "template",
  [["a"], [{"name": "default"}], [{"name": ["default"], "template": "x"}], 5, {"default": "x"}],
)
def test_a_damaged_chat_template_is_named(template, tmp_path):
  with pytest.raises(ConfigError, match="chat_template in tokenizer_config.json must be"):
    with_template(tmp_path / "hf", template).render(HELLO)


def test_a_chat_template_that_is_not_utf8_is_named(tmp_path):
  with_template(tmp_path / "hf", None)
  (tmp_path / "hf/chat_template.jinja").write_bytes(b"\xe9 {{ messages }}")
  with pytest.raises(ConfigError, match="chat_template.jinja beside the tokenizer is not UTF-8"):
    tokenizer.load(tmp_path / "hf").render(HELLO)


# Written after DeepSeek-R1's template, which writes calls only beside a content of None.
_WRITES_CALLS_BESIDE_NONE = """
{%- for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}
{%- for call in m['tool_calls'] %}{{ '<call>' + call['function']['name'] }}{% endfor %}
{%- else %}{{ m['content'] }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize(
  "template, text",
  [
    (_WRITES_CALLS_BESIDE_NONE, "?<call>add"),
    (_WRITES_CALLS_BESIDE_NONE.replace("is none", "== None"), "?<call>add"),
    ("{% for m in messages %}{{ '[' + m.content + ']' }}{% endfor %}", "[][?][]"),
    (
      "{% for m in messages %}{{ m.content }}{% if m.tool_calls is none %}{% endif %}{% endfor %}",
      "?",
    ),
    ("{% for m in messages %}{{ m.content if m.content is not none else 0 }}{% endfor %}", "?0"),
    # Qwen3's asks that of another field.
    (
      "{% for m in messages %}{% if m.reasoning_content is not none %}{% endif %}"
      "{{ m.content + '.' }}{% endfor %}",
      ".?..",
    ),
  ],
)
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}], ids=str)
def test_a_missing_content_beside_a_call_is_none_where_a_template_asks(
  template, text, content, tmp_path
):
  calls = [{"type": "function", "function": {"name": "add", "arguments": "{}"}}]
  called = {"role": "assistant", **content, "tool_calls": calls}
  messages = [{"role": "system", "content": ""}, {"role": "user", "content": "?"}, called]
  assert with_template(tmp_path / "hf", template).render(messages) == text


@pytest.mark.parametrize(
  "messages", [[], "hello", [{"role": "user"}], [{"role": "user", "content": None}], ["hello"]]
)
def test_a_value_that_is_not_a_conversation_is_refused(tmp_path, messages):
  with pytest.raises(
    ConfigError,
    match="^the chat template in tokenizer_config.json: a (conversation|message) must be ",
  ):
    with_template(tmp_path / "hf", "x").render(messages)
