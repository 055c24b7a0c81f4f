import dataclasses
from pathlib import Path
import time

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from grpo_jax.config import Data
from grpo_jax.data import loader
from grpo_jax.data.prompts import PromptSet
from grpo_jax.data.tasks import tasks
from grpo_jax.data.tokenizers import tokenizer
from grpo_jax.settings import ConfigError, ConfigStopsRun

TOKENIZER = tokenizer.characters("abcdefg?")
SPLIT = [
  {"question": "ab", "solution": "cd", "answer": "1"},
  {"question": "abcdef", "solution": "c", "answer": "2"},
  {"question": "a", "solution": "cdefg", "answer": "3"},
]


DATA = Data(
  task="",
  path="",
  tokenizer="",
  prompt="{question}?",
  chat=False,
  system="",
  max_prompt_tokens=3,
)
CHAT = dataclasses.replace(DATA, prompt="{question}", chat=True, max_prompt_tokens=99)


def make_prompts(max_tokens=3, template="{question}?"):
  """The prompts of SPLIT."""
  data = dataclasses.replace(DATA, prompt=template, max_prompt_tokens=max_tokens)
  return PromptSet(SPLIT, TOKENIZER, data)


def make_chats(tokens, examples, **changes):
  """The prompts of `examples` with data.chat, and with other changes to the config."""
  return PromptSet(examples, tokens, dataclasses.replace(CHAT, **changes))


def all_of(prompts, name):
  """The attribute `name` of every prompt."""
  return [getattr(prompt, name) for prompt in prompts.make(range(len(prompts)))]


def family(name):
  """The tokenizer of a model family."""
  return tokenizer.load(Path(__file__).parent / "golden/tokenizers" / name)


@given(st.integers(0, 2**40), st.integers(1, 40), st.integers(1, 17))
@settings(max_examples=60)
def test_every_epoch_has_every_example_once(seed, size, count):
  num_steps = -(-3 * size // count)  # enough for three epochs
  steps = [loader.step_indices(seed, step, count, size) for step in range(num_steps)]
  for epoch in np.concatenate(steps)[: 3 * size].reshape(3, size):
    assert sorted(epoch) == list(range(size))


@given(st.integers(0, 2**40), st.integers(1, 5))
def test_batch_size_does_not_change_the_order(seed, count):
  whole = loader.step_indices(seed, 0, 60, 23)
  parts = [loader.step_indices(seed, step, count, 23) for step in range(60 // count)]
  assert np.concatenate(parts).tolist() == whole[: 60 // count * count].tolist()


def test_indices_are_shuffled_and_depend_only_on_the_arguments():
  first = loader.step_indices(7, 3, 32, 1000)
  assert first.tolist() == loader.step_indices(7, 3, 32, 1000).tolist()
  epochs = loader.step_indices(7, 0, 2000, 1000).reshape(2, 1000)
  for a, b in [
    (epochs[0], epochs[1]),
    (epochs[0], np.arange(1000)),
    (epochs[0], loader.step_indices(8, 0, 1000, 1000)),
  ]:
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.15 and (a == b).sum() < 10
  assert loader.step_indices(-1, 0, 5, 5).shape == (5,)


def test_indices_never_change():
  words = np.random.Philox(key=np.array([3, 1], np.uint64)).random_raw(6)
  assert loader.step_indices(3, 1, 6, 6).tolist() == np.argsort(words).tolist()
  assert loader.step_indices(3, 0, 8, 8).tolist() == [6, 1, 5, 2, 7, 4, 3, 0]
  assert loader.step_indices(0, 10**9, 4, 10**4).shape == (4,)


@given(st.integers(0, 2**40), st.integers(1, 300), st.integers(0, 3))
@settings(max_examples=40)
def test_a_long_epoch_has_every_example_once_without_a_sort(seed, size, epoch):
  before, loader._SORTED = loader._SORTED, 0
  try:
    whole = loader.indices_at(seed, epoch * size + np.arange(size), size)
    alone = loader.indices_at(seed, np.array([epoch * size + size // 2]), size)
  finally:
    loader._SORTED = before
  assert sorted(whole) == list(range(size)) and alone == whole[size // 2]


def test_a_long_epoch_is_shuffled_and_never_changes(monkeypatch):
  monkeypatch.setattr(loader, "_SORTED", 0)
  epochs = loader.step_indices(7, 0, 8000, 4000).reshape(2, 4000)
  other_seed = loader.step_indices(8, 0, 4000, 4000)
  for a, b in ((epochs[0], epochs[1]), (epochs[0], np.arange(4000)), (epochs[0], other_seed)):
    # 5 standard deviations of a correlation, and a Poisson(1) number of equal places
    assert abs(np.corrcoef(a, b)[0, 1]) < 5 / 4000**0.5 and (a == b).sum() < 10
  assert abs(np.corrcoef(epochs[0][1:], epochs[0][:-1])[0, 1]) < 5 / 4000**0.5
  assert loader.step_indices(3, 0, 8, 8).tolist() == [0, 5, 1, 4, 3, 7, 6, 2]
  assert loader.step_indices(3, 3, 2, 10**9).tolist() == [849459214, 139030414]


def test_prompts_that_are_too_long_are_dropped_and_counted():
  made = make_prompts()
  assert (len(made), made.dropped, made.max_tokens) == (2, 1, 3)
  assert all_of(made, "example") == [SPLIT[0], SPLIT[2]] and made.example(1) is SPLIT[2]
  assert all_of(made, "text") == ["ab?", "a?"]
  assert make_prompts(7).dropped == 0


def test_prompt_batch():
  batch = loader.prompt_batch(make_prompts(4), np.array([1, 0, 1]))
  np.testing.assert_array_equal(batch.prompts_PS, [[2, 9, 0, 0], [2, 3, 9, 0], [2, 9, 0, 0]])
  assert batch.prompts_PS.dtype == batch.prompt_lengths_P.dtype == np.int32
  assert batch.prompt_lengths_P.tolist() == [2, 3, 2]
  assert batch.columns == {
    "prompts": ["a?", "ab?", "a?"],
    "question": ["a", "ab", "a"],
    "solution": ["cdefg", "cd", "cdefg"],
    "answer": ["3", "1", "3"],
  }


def test_supervised_batch_ends_solutions_and_leaves_out_long_ones():
  batch = loader.supervised_batch(make_prompts(), np.array([0, 1]), TOKENIZER, 4)
  # The first solution is c d <eos>. The second one, cdefg<eos>, has 6 tokens.
  np.testing.assert_array_equal(batch.completions_PT, [[4, 5, 1, 0], [0, 0, 0, 0]])
  np.testing.assert_array_equal(batch.mask_PT, [[1, 1, 1, 0], [0, 0, 0, 0]])
  assert batch.completions_PT.dtype == np.int32 and batch.mask_PT.dtype == np.float32
  assert batch.dropped == 1 and batch.prompts.columns["prompts"] == ["ab?", "a?"]
  whole = loader.supervised_batch(make_prompts(), np.array([0, 1]), TOKENIZER, 6)
  assert whole.dropped == 0
  assert whole.completions_PT[1].tolist() == [4, 5, 6, 7, 8, 1]
  assert whole.mask_PT[1].all()


def test_a_warm_start_does_not_imitate_empty_solutions():
  rows = [dict(question="a", solution="cd", answer="1"), dict(question="b", solution="", answer="")]
  made = PromptSet(rows, TOKENIZER, DATA)
  with pytest.raises(ConfigStopsRun, match="no text in the field solution"):
    loader.supervised_batch(made, np.arange(2), TOKENIZER, 4)


def test_a_warm_start_that_would_learn_nothing_is_refused():
  with pytest.raises(
    ConfigStopsRun, match="max_tokens is 2: all 2 solutions .* raise it, in another --workdir"
  ):
    loader.supervised_batch(make_prompts(), np.arange(2), TOKENIZER, 2)


@pytest.mark.parametrize(
  "template, message",
  [
    (
      "{qestion}",
      r"data.prompt='\{qestion\}' .*its fields are \{question\}, \{solution\}, \{answer\}",
    ),
    ("{question} {}", "data.prompt"),
    ("{question", "data.prompt"),
    ("{question.x}", "data.prompt"),
    ("", "data.prompt='' has no field, so all prompts would be the same"),
    ("Solve:", "data.prompt='Solve:' has no field, .* its fields are "),
    ("{{question}}", "has no field"),
    ("{question:>999999999}", "cannot be filled"),
    ("{question:{answer}}", "cannot be filled"),
    ("{question.__class__}", "cannot be filled"),
    ("{question[0]}", "cannot be filled"),
    ("{question!r}", "cannot be filled"),
  ],
)
def test_bad_templates_are_named(template, message):
  with pytest.raises(ConfigError, match=message):
    make_prompts(template=template)


def test_bad_lengths_and_tokenizers_are_named():
  with pytest.raises(
    ConfigError, match="data.max_prompt_tokens=1 drops all 3 prompts; the shortest one has 2 tokens"
  ):
    make_prompts(1)
  with pytest.raises(ConfigError, match="'z'"):
    make_prompts(template="{question}z")
  endless = dataclasses.replace(TOKENIZER, stop_ids=())
  with pytest.raises(ConfigError, match="data.tokenizer names no end-of-sequence token"):
    loader.supervised_batch(make_prompts(), np.array([0]), endless, 4)


def test_arithmetic_prompts_are_made_quickly():
  task = tasks.arithmetic("")
  start = time.process_time()
  data = dataclasses.replace(DATA, prompt="{question}", max_prompt_tokens=64)
  made = PromptSet(task.train, tokenizer.characters(task.alphabet), data)
  assert len(made) == 20_000 and made.dropped == 0
  assert time.process_time() - start < 8  # about 0.5 s when the machine is free
  batch = loader.prompt_batch(made, loader.step_indices(0, 5, 32, len(made)))
  assert batch.prompts_PS.shape == (32, 16)  # the longest of them has 12 tokens
  assert batch.columns["answer"][0] == str(eval(batch.columns["prompts"][0][:-1]))


def test_prompts_are_padded_to_the_longest_one_that_was_counted():
  split = [{"question": "a" * n} for n in (3, 17, 33, 70)]
  for most, width in ((80, 80), (76, 76), (71, 71), (70, 48), (40, 40), (32, 32), (20, 20)):
    data = dataclasses.replace(DATA, max_prompt_tokens=most)
    made = PromptSet(split, TOKENIZER, data)
    assert made.max_tokens == width, most  # a question mark follows the question
    assert max(len(prompt.ids) for prompt in made.make(range(len(made)))) <= width
    assert loader.prompt_batch(made, np.array([0])).prompts_PS.shape == (1, width)
  # Where rows are read later, a longer one may come.
  later = PromptSet(
    split, TOKENIZER, dataclasses.replace(DATA, max_prompt_tokens=99, count_at_start=1)
  )
  assert later.max_tokens == 99


class Opens:
  """An environment that begins with so many characters."""

  schemas = []

  def __init__(self, *sizes):
    self._sizes = sizes

  def tools_of(self, example):
    return []

  def openings(self, examples):
    sizes = [self._sizes[one["place"] % len(self._sizes)] for one in examples]
    return [[{"role": "user", "content": "ab?" * (size // 3)}] for size in sizes]


class Counting:
  """A tokenizer of the library that notes how many characters it gets at once."""

  def __init__(self, engine):
    self._engine, self.seen = engine, []

  def __getattr__(self, name):
    return getattr(self._engine, name)

  def encode_batch(self, texts, **options):
    self.seen.append(sum(map(len, texts)))
    return self._engine.encode_batch(texts, **options)


def opened(count, max_tokens, *sizes, tokens=None):
  """(prompts whose environment begins with so many characters, the characters encoded at once)."""
  tokens = tokens or tokenizer.characters("ab?")
  tokens.codec._engine = engine = Counting(tokens.codec._engine)
  data = dataclasses.replace(DATA, prompt="", max_prompt_tokens=max_tokens)
  split = [{"question": "", "place": place} for place in range(count)]
  return PromptSet(split, tokens, data, environment=Opens(*sizes)), engine.seen


def test_of_prompts_that_are_far_too_long_only_the_beginning_is_tokenized():
  prompts, seen = opened(300, 64, 21_000, 30)
  assert prompts.dropped == len(prompts) == 150
  assert sum(seen) < 150 * 2_000  # of 3,150,000


def test_long_prompts_that_fit_are_tokenized_a_few_at_once():
  prompts, seen = opened(200, 21_000, 21_000)
  assert len(prompts) == 200 and sum(seen) == 200 * 21_000
  assert max(seen) <= 1_000_000
  assert len(prompts.make([7])[0].ids) == 21_000


def test_a_long_text_of_few_tokens_is_tokenized_whole():
  split = [{"question": text} for text in ("<|endoftext|>" * 90, "a" * 20_000)]
  tokens = family("qwen")
  whole = len(tokens.encode(split[0]["question"] + "?"))
  assert whole == 91  # of 1,171 characters
  data = dataclasses.replace(DATA, prompt="{question}?", max_prompt_tokens=whole)
  made = PromptSet(split, tokens, data)
  assert (len(made), made.dropped) == (1, 1) and len(made.make([0])[0].ids) == whole
  for most, length in ((90, "91"), (14, "91"), (13, "about 91")):
    with pytest.raises(
      ConfigError, match=f"drops all 2 prompts; the shortest one has {length} tok"
    ):
      PromptSet(split, tokens, dataclasses.replace(data, max_prompt_tokens=most))


# Conversations.

USER, SYSTEM = {"role": "user", "content": "2 pens?"}, {"role": "system", "content": "Count."}
EXAMPLE = {"question": "2 pens?", "solution": "two", "answer": "2"}


def test_a_plain_prompt_begins_with_the_prefix():
  for name, prefix in (("llama3", "<|begin_of_text|>"), ("llama2", "<s>"), ("qwen", "")):
    tokens = family(name)
    made = PromptSet([EXAMPLE], tokens, dataclasses.replace(DATA, max_prompt_tokens=20))
    (prompt,) = made.make([0])
    assert prompt.text == "2 pens??" and prompt.messages is None
    assert prompt.ids == tokens.encode(prefix) + tokens.encode("2 pens??")
    n = len(prompt.ids)  # the prefix counts
    with pytest.raises(ConfigError, match=f"the shortest one has {n} tokens"):
      PromptSet([EXAMPLE], tokens, dataclasses.replace(DATA, max_prompt_tokens=n - 1))
    # A solution has no prefix, no added space before it, and one stop token after it.
    batch = loader.supervised_batch(made, np.array([0]), tokens, 9)
    ids = batch.completions_PT[0, batch.mask_PT[0] > 0].tolist()
    assert tokens.decode(ids) == "two"
    assert ids[-1] == tokens.stop_ids[0]
    assert not set(ids) & set(tokens.prefix_ids)


def test_the_prompt_is_the_users_message_of_a_conversation():
  tokens = family("llama3")
  made = make_chats(tokens, [EXAMPLE], system="Count.")
  text = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCount.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n2 pens?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
  )
  (prompt,) = made.make([0])
  assert prompt.text == text and prompt.ids == tokens.encode(text)
  assert prompt.ids.count(tokens.prefix_ids[0]) == 1
  assert loader.prompt_batch(made, np.array([0, 0])).columns == {
    "prompts": [text] * 2,
    "messages": [[SYSTEM, USER]] * 2,
    "question": ["2 pens?"] * 2,
    "solution": ["two"] * 2,
    "answer": ["2"] * 2,
  }
  framed = make_chats(tokens, [EXAMPLE], prompt="Q: {question}")
  assert all_of(framed, "messages") == [[{"role": "user", "content": "Q: 2 pens?"}]]


def test_a_field_of_the_example_may_hold_the_messages():
  tokens = family("qwen")
  dialogue = [USER, {"role": "assistant", "content": "2"}, {"role": "user", "content": "Sure?"}]
  questions = [dialogue, [SYSTEM, USER], "2 pens?"]
  made = make_chats(tokens, [{"question": q} for q in questions], system="Be brief.")
  brief = {"role": "system", "content": "Be brief."}
  # The second conversation keeps its own system message.
  assert all_of(made, "messages") == [[brief, *dialogue], [SYSTEM, USER], [brief, USER]]
  text = all_of(made, "text")[0]
  assert text == tokens.render([brief, *dialogue])
  assert text.endswith("<|im_start|>assistant\n")
  as_in_trl = make_chats(tokens, [{"prompt": [USER]}], prompt="{prompt}")
  assert all_of(as_in_trl, "messages") == [[USER]]


@pytest.mark.parametrize(
  "changes, question, message",
  [
    (
      dict(chat=False),
      [USER],
      r"data.prompt='\{question\}': question is a list of messages.*set data.chat=True and"
      r" data.prompt='\{question\}'$",
    ),
    (
      dict(prompt="Q: {question}"),
      [USER],
      r"data.prompt='Q: \{question\}': question is a list of messages",
    ),
    (
      {},
      [],
      r"data.prompt='\{question\}': a conversation must be a list of messages, at least one",
    ),
    (
      {},
      [{"role": "user", "content": [{"type": "image"}]}],
      "a message has an image, which the model does not see",
    ),
    (dict(prompt="{qestion}"), "x", r"data.prompt='\{qestion\}' cannot be filled"),
  ],
)
def test_a_value_that_is_not_a_conversation_is_named(changes, question, message):
  with pytest.raises(ConfigError, match=message) as error:
    make_chats(family("qwen"), [{"question": question}], **changes)
  assert "\n" not in str(error.value)


def test_a_tokenizer_without_a_chat_template_is_named():
  with pytest.raises(
    ConfigError, match="data.tokenizer: no chat template .* or set data.chat=False"
  ):
    PromptSet(SPLIT, TOKENIZER, dataclasses.replace(DATA, chat=True))
