"""Writes small tokenizers of several families with chat templates, and the ids they give.

  python tests/golden/make_tokenizers.py [NAME]
  python tests/golden/make_tokenizers.py compare FOLDER

transformers computes the ids. `compare` tokenises all GSM8K texts of FOLDER with transformers,
which reads what Tokenizer.save writes, and with grpo_jax, and counts the texts with equal ids. It
also counts the texts that are equal after a round trip, each as a text that follows another. It
keeps digests of the ids that transformers gives for the test split.

Made with transformers 5.23.0, tokenizers 0.23.3 and sentencepiece 0.2.3. The corpus is generated
in this file.
"""

# ruff: noqa: E501, because templates and sentences are long lines

import hashlib
import io
import json
from pathlib import Path
import random
import shutil
import string
import sys
import tempfile

import sentencepiece
import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers, processors
import transformers

FOLDER = Path(__file__).parent / "tokenizers"
TEXTS = [
  "",
  " ",
  "\n",
  "  \n\n ",
  "x",
  " x",
  "Ann has 3 boxes of 12 pens.",
  "7 + 15 = 22;\n22 - 6 = 16\n#### 16",
  "two  spaces   here ",
  "  leading",
  "trailing\n",
  "tabs\tand\r\nreturns",
  "$1,250.75 is 50% of $2,501.50",
  "it's they'll I'D WE'VE",
  "naïve café",
  "cafe\u0301 and caf\u00e9",
  "北京有多少人?",
  "🦜 flies 👩\u200d👩\u200d👧 home",
  "Ωß ✓ \u2028 \u00a0 end",
  "▁ is not a space",
  "0123456789 12345 1 22 333",
  "a<|im_end|>b",
  "<|im_start|>user\nhi<|im_end|> \n",
  "<s>one</s> two",
  "</s>",
  "<unk> <pad>",
  "<|begin_of_text|>x<|eot_id|>y",
  "<|eot_id|> y",
  "<end_of_turn>\n<start_of_turn>",
  "<bos>x <eos>",
  "<0x0A> [INST]",
  "[note] and[note]s",
  "#### 72",
  "word" * 30,
  "\\boxed{\\frac{1}{2}}",
  "{question} {{ x }} {% if %}",
  "<|end|> \n<|user|>\n <|assistant|>",
]
USER = {"role": "user", "content": "Ann has 3 boxes of 12 pens.\nHow many pens? 🦜"}
SYSTEM = {"role": "system", "content": "  Think first, é.\n"}
ANSWER = {"role": "assistant", "content": " 3 * 12 = 36\n#### 36 "}
CONVERSATIONS = [
  [USER],
  [SYSTEM, USER],
  [USER, ANSWER],
  [SYSTEM, USER, ANSWER],
  [USER, ANSWER, {"role": "user", "content": "And twice?"}],
  [{"role": "user", "content": ""}],
  [{"role": "user", "content": "an <|im_end|> <eos> </s> <|eot_id|> inside <b>&'\""}],
]

QWEN = """{%- if messages[0].role == 'system' %}
  {%- set first, rest = messages[0].content, messages[1:] %}
{%- else %}
  {%- set first, rest = 'You solve problems.', messages %}
{%- endif %}
{{- '<|im_start|>system\\n' + first + '<|im_end|>\\n' }}
{%- if tools %}{{ raise_exception('no tools here') }}{% endif %}
{%- for message in rest %}
  {%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
  {%- else %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA3 = """{{- bos_token }}
{%- for message in messages %}
    {%- if loop.index > 5 %}{% break %}{% endif %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
LLAMA2 = """{% set ns = namespace(lead='') %}
{% for message in messages %}
{% if message['role'] == 'system' %}
{% set ns.lead = '<<SYS>>\\n' + message['content'] + '\\n<</SYS>>\\n\\n' %}
{% elif message['role'] == 'user' %}
{{ bos_token + '[INST] ' + ns.lead + message['content'].strip() + ' [/INST]' }}{% set ns.lead = '' %}
{% else %}
{{ ' ' + message['content'] | trim + ' ' + eos_token }}
{% endif %}
{% endfor %}"""
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' -}}
{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
PHI = """{% for message in messages %}{{ '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}
{# #}{{ '' if messages | tojson == '<>' }}"""

# The pattern of the classes of both families, with %s for numbers. transformers has its own pattern
# for Qwen2, whatever tokenizer.json says.
PATTERN = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
  r"\s+(?!\S)|\s+"
)


def corpus():
  rng = random.Random(0)
  names, things = (
    ("Ann", "Bo", "Chidi", "Noor", "Zoë", "José"),
    ("pens", "apples", "coins", "kilometres", "books", "euros"),
  )
  for _ in range(1500):
    a, b, c = rng.randint(2, 99), rng.randint(2, 12), rng.randint(1, 2000)
    name, other, thing = rng.choice(names), rng.choice(names), rng.choice(things)
    yield rng.choice(
      (
        f"{name} has {a} boxes of {b} {thing} and {c} {thing} more. How many {thing} does {name} have?",
        f"Each day {name} gives {other} {b} {thing}. After {a} days, how many {thing} has {other} got?",
        f"There are {a} * {b} = {a * b} {thing}.\nTogether that makes {a * b} + {c} = {a * b + c}.\n#### {a * b + c}",
        f"{name}'s {thing} cost ${c}.{b:02d} each; {other} pays {a}% less.  Let's think step by step.\n\n",
      )
    )
  yield from ("naïve café, 北京 und Übergröße", "two  spaces, \ttabs")


def byte_level(folder, special, pattern, normalizer, processor):
  engine = tokenizers.Tokenizer(tokenizers.models.BPE())
  engine.normalizer = normalizer
  engine.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  engine.decoder = decoders.ByteLevel()
  engine.train_from_iterator(
    corpus(),
    tokenizers.trainers.BpeTrainer(
      vocab_size=600,
      show_progress=False,
      initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    ),
  )
  engine.add_special_tokens(special)
  engine.post_processor = processor(engine)
  engine.save(str(folder / "tokenizer.json"))


def pieces(folder, **options):
  out = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=corpus(),
    model_writer=out,
    vocab_size=600,
    byte_fallback=True,
    minloglevel=2,
    num_threads=1,
    normalization_rule_name="identity",
    remove_extra_whitespaces=False,
    allow_whitespace_only_pieces=True,
    split_digits=True,
    **options,
  )
  (folder / "tokenizer.model").write_bytes(out.getvalue())


def write(folder, name, value):
  (folder / name).write_text(
    json.dumps(value, indent=1, ensure_ascii=False) if isinstance(value, dict) else value
  )


def token(content, **options):
  return (
    dict(
      content=content, lstrip=False, normalized=False, rstrip=False, single_word=False, special=True
    )
    | options
  )


def named(content):
  return {"__type": "AddedToken"} | token(content)


def qwen(folder):
  """Like Qwen2.5-Instruct: no token before a prompt, two tokens that end a text."""
  byte_level(
    folder,
    ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    PATTERN % r"\p{N}",
    normalizers.NFC(),
    lambda _: processors.ByteLevel(trim_offsets=False),
  )
  write(
    folder,
    "tokenizer_config.json",
    dict(
      tokenizer_class="Qwen2Tokenizer",
      add_bos_token=False,
      add_prefix_space=False,
      bos_token=None,
      eos_token="<|im_end|>",
      pad_token="<|endoftext|>",
      unk_token=None,
      clean_up_tokenization_spaces=False,
      chat_template=QWEN,
    ),
  )
  ids = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id
  write(
    folder, "generation_config.json", {"eos_token_id": [ids("<|im_end|>"), ids("<|endoftext|>")]}
  )


def llama3(folder):
  """Like Llama 3: the post-processor adds a token before a prompt. The template has its own file."""

  def processor(engine):
    first = "<|begin_of_text|>"
    return processors.Sequence(
      [
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(
          single=f"{first} $A",
          pair=f"{first} $A {first}:1 $B:1",
          special_tokens=[(first, engine.token_to_id(first))],
        ),
      ]
    )

  byte_level(
    folder,
    [
      "<|begin_of_text|>",
      "<|end_of_text|>",
      "<|start_header_id|>",
      "<|end_header_id|>",
      "<|eot_id|>",
    ],
    PATTERN % r"\p{N}{1,3}",
    None,
    processor,
  )
  write(
    folder,
    "tokenizer_config.json",
    dict(
      tokenizer_class="PreTrainedTokenizerFast",
      bos_token="<|begin_of_text|>",
      eos_token="<|eot_id|>",
      clean_up_tokenization_spaces=False,
      chat_template="of no use beside chat_template.jinja",
    ),
  )
  write(folder, "chat_template.jinja", LLAMA3)


def llama2(folder):
  """Like Llama 2: only sentencepiece, which adds a space before each text.

  It has several templates, and tokens that the sentencepiece model does not have.
  """
  pieces(folder, model_type="bpe")
  added = {str(i): token(text) for i, text in enumerate(("<unk>", "<s>", "</s>"))}
  added |= {
    "600": token("<|im_start|>"),
    "601": token("<|im_end|>"),
    "602": token("[note]", special=False),
  }
  write(
    folder,
    "tokenizer_config.json",
    dict(
      tokenizer_class="LlamaTokenizer",
      add_bos_token=True,
      add_eos_token=False,
      legacy=False,
      bos_token=named("<s>"),
      eos_token=named("</s>"),
      unk_token=named("<unk>"),
      pad_token=None,
      clean_up_tokenization_spaces=False,
      added_tokens_decoder=added,
      chat_template=[dict(name="default", template=LLAMA2), dict(name="tool_use", template="x")],
    ),
  )


def gemma(folder):
  """Like Gemma: only sentencepiece, no space before a text, and its own symbols.

  Its template refuses a system prompt.
  """
  symbols = ["<mask>", "<start_of_turn>", "<end_of_turn>"]
  pieces(
    folder,
    model_type="bpe",
    add_dummy_prefix=False,
    user_defined_symbols=symbols,
    pad_id=0,
    eos_id=1,
    bos_id=2,
    unk_id=3,
    pad_piece="<pad>",
    eos_piece="<eos>",
    bos_piece="<bos>",
  )
  write(
    folder,
    "tokenizer_config.json",
    dict(
      tokenizer_class="GemmaTokenizer",
      add_bos_token=True,
      add_eos_token=False,
      bos_token="<bos>",
      eos_token="<eos>",
      pad_token="<pad>",
      unk_token="<unk>",
      clean_up_tokenization_spaces=False,
      chat_template=GEMMA,
      added_tokens_decoder={
        str(i): token(text) for i, text in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", *symbols])
      },
    ),
  )
  write(folder, "generation_config.json", {"eos_token_id": [1, 6]})


def converted():
  """A sentencepiece model as a tokenizer.json with the normalizer of Llama 2 and Phi-3."""
  with tempfile.TemporaryDirectory() as other:
    other = Path(other)
    pieces(other, model_type="bpe")
    write(
      other,
      "tokenizer_config.json",
      dict(tokenizer_class="LlamaTokenizer", legacy=False, unk_token="<unk>"),
    )
    made = transformers.AutoTokenizer.from_pretrained(other)
    engine = made.backend_tokenizer
  engine.normalizer = normalizers.Sequence(
    [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
  )
  engine.pre_tokenizer = None
  return engine


def llama2_json(folder):
  """Like the tokenizer.json of Llama 2, whose normalizer transformers 5 ignores."""
  engine = converted()
  engine.post_processor = processors.TemplateProcessing(
    single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
  )
  engine.save(str(folder / "tokenizer.json"))
  write(
    folder,
    "tokenizer_config.json",
    dict(
      tokenizer_class="LlamaTokenizer",
      legacy=False,
      bos_token="<s>",
      eos_token="</s>",
      unk_token="<unk>",
      clean_up_tokenization_spaces=False,
      chat_template=LLAMA2,
    ),
  )


def phi(folder):
  """Like Phi-3: the same kind of tokenizer.json, but transformers uses its normalizer.

  Special tokens swallow the whitespace after them.
  """
  engine = converted()
  engine.add_special_tokens(
    [
      tokenizers.AddedToken(text, rstrip=True, normalized=False)
      for text in ("<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>")
    ]
  )
  engine.post_processor = processors.TemplateProcessing(
    single="$A </s>", pair="$A $B", special_tokens=[("</s>", 2)]
  )
  engine.save(str(folder / "tokenizer.json"))
  write(
    folder,
    "tokenizer_config.json",
    dict(
      tokenizer_class="PreTrainedTokenizerFast",
      bos_token="<s>",
      eos_token="<|endoftext|>",
      pad_token="<|endoftext|>",
      unk_token="<unk>",
      clean_up_tokenization_spaces=False,
      chat_template=PHI,
    ),
  )


# ASCII, the other characters of GSM8K, and some that Unicode composes, replaces or splits: accents,
# Ångström, Korean, a soft hyphen. Some are symbols of bytes in byte-level tokenizers, such as Ġ.
ALPHABET = (
  string.printable
  + "\xa0¢£³¼½¾×çèéñ÷А\u200b–—‘’“”\u2028€−√"
  + "\u0301\u0344\u212bÀńĠĊ\xad\x85Ω北\u1100\u1161가🦜"
)
MODEL_TYPES = (
  "qwen2",
  "qwen3",
  "qwen3_moe",
  "llama",
  "mistral",
  "phi3",
  "gemma2",
  "gemma3_text",
)


def characters(folder):
  """What `tokenizer.characters` writes, and the ids of texts for a model of any type."""
  from grpo_jax.data.tokenizers import tokenizer  # the other files are made without it

  tokenizer.characters(ALPHABET).save(folder)
  texts = [ALPHABET, ALPHABET[::-1], "#### 21", "<eos> a <pad>", "  two\n\n  lines ", ""]
  texts += [f" {c}{c}1{c} {c}  a{c}" for c in ALPHABET]
  cases = {}
  for model_type in MODEL_TYPES:
    write(folder, "config.json", {"model_type": model_type})
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    rows = reference(texts)["input_ids"]
    decoded = reference.batch_decode(rows)
    cases[model_type] = [
      dict(text=text, ids=ids, decoded=again) for text, ids, again in zip(texts, rows, decoded)
    ]
  (folder / "config.json").unlink()
  assert all(found == cases["qwen2"] for found in cases.values())
  write(folder, "expected.json", dict(alphabet=ALPHABET, texts=cases["qwen2"]))


FAMILIES = (qwen, llama3, llama2, llama2_json, gemma, phi)
NAMES = [make.__name__ for make in (*FAMILIES, characters)]


def expected(folder):
  """What transformers makes of TEXTS and CONVERSATIONS with the tokenizer of a folder."""
  reference = transformers.AutoTokenizer.from_pretrained(folder)
  chats = []
  for messages in CONVERSATIONS:
    for prompt in (True, False):
      try:
        chats.append(
          dict(
            messages=messages,
            generation_prompt=prompt,
            text=reference.apply_chat_template(
              messages, add_generation_prompt=prompt, tokenize=False
            ),
            ids=reference.apply_chat_template(
              messages, add_generation_prompt=prompt, return_dict=False
            ),
          )
        )
      except Exception as error:
        chats.append(dict(messages=messages, generation_prompt=prompt, error=str(error)))
  plain = [
    dict(
      text=text,
      ids=reference.encode(text, add_special_tokens=False),
      prompt_ids=reference.encode(text),
    )
    for text in TEXTS
  ]
  return dict(texts=plain, chats=chats)


def main():
  made = [make for make in (*FAMILIES, characters) if make.__name__ in (sys.argv[1:] or NAMES)]
  for make in made:
    folder = FOLDER / make.__name__
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    make(folder)
    if make is characters:
      continue
    (folder / "expected.json").write_text(
      json.dumps(expected(folder), ensure_ascii=False, separators=(",", ":")) + "\n"
    )


def compare(path):
  from grpo_jax.data.tokenizers import (
    tokenizer,  # imported here because the files are made without it
  )

  digests = {}
  for make in FAMILIES:
    name, counts = make.__name__, {}
    tested = tokenizer.load(FOLDER / name)
    with tempfile.TemporaryDirectory() as saved:
      tested.save(saved)
      reference = transformers.AutoTokenizer.from_pretrained(saved)
    for split in ("train", "test"):  # digests of "test" replace those of "train"
      rows = [json.loads(line) for line in (Path(path) / f"{split}.jsonl").open(encoding="utf-8")]
      texts = [row[key] for row in rows for key in ("question", "answer")]
      system = [dict(role="system", content="Think first.")] * (make is not gemma)
      chats = [
        [
          *system,
          dict(role="user", content=row["question"]),
          dict(role="assistant", content=row["answer"]),
        ]
        for row in rows
      ]
      prompts = [chat[:-1] for chat in chats]
      pairs = {
        "plain": (
          reference(texts, add_special_tokens=False)["input_ids"],
          tested.encode_batch(texts),
        ),
        "chat, prompt": (
          reference.apply_chat_template(prompts, add_generation_prompt=True, return_dict=False),
          tested.encode_batch([tested.render(chat) for chat in prompts]),
        ),
        "chat, answered": (
          reference.apply_chat_template(chats, return_dict=False),
          tested.encode_batch([tested.render(chat, generation_prompt=False) for chat in chats]),
        ),
        "round trip": (texts, [tested.decode(ids) for ids in tested.encode_batch_after(texts)]),
      }
      for what, (first, second) in pairs.items():
        equal, of = counts.get(what, (0, 0))
        counts[what] = (
          equal + sum(a == b for a, b in zip(first, second, strict=True)),
          of + len(first),
        )
      digests[name] = {
        what: digest(pairs[what][0]) for what in ("plain", "chat, prompt", "chat, answered")
      }
    print(
      f"{name:11}",
      *(f"{what}: {equal} of {of}" for what, (equal, of) in counts.items()),
      sep="  ",
      flush=True,
    )
  (FOLDER / "gsm8k.json").write_text(json.dumps(digests, indent=1) + "\n")


def digest(ids):
  return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


if __name__ == "__main__":
  compare(sys.argv[2]) if sys.argv[1:2] == ["compare"] else main()
