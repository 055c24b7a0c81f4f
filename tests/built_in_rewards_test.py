"""The built-in reward functions, each on examples that were worked by hand."""

from fractions import Fraction
import itertools
import json
import socket
import sys
import threading
import time

from hypothesis import given
from hypothesis import strategies as st
import pytest

from grpo_jax import rewards
from grpo_jax.rewards.functions.countdown import evaluate
from grpo_jax.rewards.marks import has_mark
from grpo_jax.rewards.names import REWARDS
from grpo_jax.settings import ConfigError


def scores(name, completions, **columns):
  function = rewards.resolve(name, "reward.functions", lambda name: False)
  columns = {"completion_ids": [list(text.encode()) for text in completions]} | columns
  return function(completions=completions, **columns)


def score(name, completion, **columns):
  return scores(name, [completion], **{key: [value] for key, value in columns.items()})[0]


@pytest.mark.parametrize(
  "text, closed, opened",
  [
    ("<think>\na\n</think>\nb", 1, 0),
    ("<think></think>", 1, 0),
    ("<think>a", 0, 0),
    ("a</think>b", 0, 1),
    (" <think>a</think>b", 0, 0),
    ("<think>a<think>b</think>c", 0, 0),
    ("<think>a</think>b<think>", 0, 0),
    ("<think>a</think></think>", 1, 0),
    ("", 0, 0),
    ("</think><think>", 0, 0),
  ],
)
def test_think_format(text, closed, opened):
  assert score("think_format", text) == closed
  assert score("think_format(opened=True)", text) == opened
  for prompt in (
    "<user>1+1=<assistant>",
    "<think>a</think>",
    "<think>\n\n</think>\n\n",
    "<think>a",
  ):
    assert score("think_format", text, prompts=prompt) == closed
  for prompt in ("<assistant><think>", "<think>x</think><assistant>\n<think>\n"):
    assert score("think_format", text, prompts=prompt) == opened


def test_the_other_forms_know_what_the_prompt_opens():
  text = "abc\n</think>\n<answer>\n7\n</answer>"
  assert score("tag_count", text, prompts="<assistant><think>\n") == 1
  assert score("tag_count", text, prompts="<assistant><think>") == 0.75
  assert score("tag_count", text, prompts="<assistant>") == 0.75
  for pattern, right in (
    (r"<think>.*</think>\s*<answer>.*</answer>", 1),
    (r".*</think>\s*<answer>.*</answer>", 1),
    (r"<think>\S.*", 0),
  ):
    name = f"regex(pattern={pattern!r})"
    assert score(name, text, prompts="<assistant><think>\n") == right
  assert score("regex(pattern='<think>.*')", text, prompts="<assistant>") == 0


@pytest.mark.parametrize(
  "text, expected",
  [
    ("<think>\nabc\n</think>\n<answer>\n7\n</answer>", 1.0),
    ("<think>\n<think>\nabc\n</think>\n<answer>\n7\n</answer>", 0.75),
    ("<think>\nabc</think>\n<answer>\n7\n</answer>", 0.75),
    ("<think>abc</think>", 0.0),
    ("", 0.0),
  ],
)
def test_tag_count(text, expected):
  assert score("tag_count", text) == expected


def test_regex():
  name = r"regex(pattern=r'<think>.*?</think>\s*<answer>.*?</answer>\s*')"
  right = "<think>a\nb</think>\n<answer>c</answer>\n"
  texts = [right, "<think>a</think>c", "x<think>", right + "more", "more" + right]
  assert scores(name, texts) == [1, 0, 0, 0, 0]


@pytest.mark.parametrize(
  "length, right, wrong",
  [(0, 1.0, -1.0), (50, 0.75, -0.75), (100, 0.5, -0.5), (1000, 0.5, -0.5), (25, 0.9268, -0.9268)],
)
def test_cosine(length, right, wrong):
  texts, ids = ["#### 5", "#### 6", "#### 5"], [[0] * length] * 3
  found = scores(
    "cosine(max_length=100, scorer='strict')", texts, answer=["5", "5", "five"], completion_ids=ids
  )
  assert found[:2] == pytest.approx([right, wrong], abs=1e-4)
  assert found[2] is None


def test_soft_overlong():
  ids = [[0] * length for length in (0, 80, 81, 90, 100, 101)]
  found = scores("soft_overlong(max_length=100, margin=20)", [""] * 6, completion_ids=ids)
  assert found == pytest.approx([0, 0, -0.05, -0.5, -1, -1])


@pytest.mark.parametrize(
  "size, text, expected",
  [
    (2, "a b a b a", -0.5),
    (1, "a b A b", -0.5),
    (3, "a b c d", 0),
    (3, "a b", 0),
    (2, "", 0),
    (2, "a a a a a", -0.75),
  ],
)
def test_repetition(size, text, expected):
  assert score(f"repetition(size={size})", text) == pytest.approx(expected)
  ids = [ord(word.lower()) for word in text.split()]
  found = score(f"repetition(size={size}, unit='tokens', penalty=-2)", "", completion_ids=ids)
  assert found == pytest.approx(2 * expected)


@pytest.mark.parametrize(
  "text, expected",
  [
    ("<think>#### 5</think> #### 7", 1),
    ("<think>#### 7</think> #### 5", 0),
    ("#### 7", 0),
    ("<think>a</think>#### 5</think>#### 7", 1),
    ("#### 7</think>", 0),
  ],
)
def test_reasoning_accuracy(text, expected):
  assert score("reasoning_accuracy(scorer='strict')", text, answer="7") == expected


def test_reasoning_accuracy_where_the_gold_answer_is_no_number():
  assert score("reasoning_accuracy(scorer='strict')", "a</think>#### 7", answer="x") is None
  assert score("reasoning_accuracy(scorer='strict')", "#### 7", answer="x") == 0


def test_reasoning_accuracy_compares_formulas():
  text = r"<think>\boxed{2}</think>So \boxed{\frac{1}{2}}."
  assert score("reasoning_accuracy", text, answer="0.5") == 1
  assert score("reasoning_accuracy", text, answer="2") == 0


@pytest.mark.parametrize(
  "expression, expected",
  [
    ("3*4-2", 1),
    ("(3*4)-2", 1),
    ("4 * 3 - 2", 1),
    ("3*4-2=10", 0),
    ("3*4-4+2", 0),
    ("12-2", 0),
    ("3*4", 0),
    ("3*4-2-0", 0),
    ("10", 0),
    ("3+4+2", 0),
    ("", 0),
    ("-2+3*4", 0),  # a sign is no operator between two values
    ("3*4+-2", 0),
    ("(3*4-2", 0),
    ("3*4-2 # 10", 0),
    ("__import__('os')", 0),
    ("3**4-2", 0),
    ("3//4*2", 0),
    ("3*4-2\n", 1),
    ("3_0*4", 0),
    ("03*4-2", 0),
    ("3.0*4-2", 0),
    ("2/(3-3)", 0),
  ],
)
def test_countdown(expression, expected):
  problem = {"numbers": [3, 4, 2], "target": 10}
  for text in (f"so <answer>{expression}</answer> ok", f"3+4+2=9;#### {expression}"):
    assert score("countdown", text, **problem) == expected
  assert score("countdown(format_score=0.1)", text, **problem) == max(0.1, expected)
  assert score("countdown(format_score=0.1)", expression, **problem) == 0


def test_countdown_is_exact_and_takes_the_last_answer():
  # 8 / (3 - 8/3) = 24, which floats miss.
  problem = {"numbers": [8, 8, 3, 3], "target": 24}
  assert score("countdown", "<answer>8/(3-8/3)</answer>", **problem) == 1
  late = "<answer>8/(3-8/3)</answer> no: <answer>8*3</answer>"
  assert score("countdown", late, **problem) == 0
  assert score("countdown", "#### 8*3\n#### 8/(3-8/3)\nThat is it.", **problem) == 1
  assert score("countdown", "<answer>8*3", **problem) == 0
  assert score("countdown", "#### 3*8", numbers=None, target=None) is None


OPERATORS = st.sampled_from("+-*/")
TREES = st.recursive(
  st.integers(0, 99),
  lambda inside: st.tuples(inside, OPERATORS, inside),
  max_leaves=8,
)


def written(tree):
  if isinstance(tree, int):
    return str(tree), Fraction(tree), [tree]
  (left, a, some), operator, (right, b, others) = written(tree[0]), tree[1], written(tree[2])
  value = None
  if a is not None and b is not None and not (operator == "/" and b == 0):
    value = {"+": a + b, "-": a - b, "*": a * b}.get(operator) if operator != "/" else a / b
  return f"({left}{operator}{right})", value, [*some, *others]


@given(TREES)
def test_expressions_have_the_value_of_fractions(tree):
  text, value, numbers = written(tree)
  assert evaluate(text) == (None if value is None else (value, numbers))


@pytest.mark.parametrize(
  "text", ["(" * 150 + "1" + ")" * 149, "1+" * 149 + "1", "9" * 300, "(" * 10**6]
)
def test_long_expressions_take_no_time(text):
  start = time.process_time()
  evaluate(text)
  assert time.process_time() - start < 0.1


@pytest.mark.parametrize(
  "text, expected",
  [
    ("Answer: B", 1),
    ("Answer: (B)", 1),
    ("Answer: **B**", 1),
    ("**Answer:** B.", 1),
    ("Answer: $\\boxed{B}$", 1),
    ("Answer: \\text{B}", 1),
    ("Answer:\nB", 1),
    ("Answer: B) a gas", 1),
    ("Answer: B. A gas", 1),
    ("Answer: B because A is wrong", 1),
    ("Answer: A. No. Answer: B", 1),
    ("Answer: B or B", 1),
    ("Answer: A", 0),
    ("Answer: A or B", 0),
    ("Answer: B or C", 0),
    ("Answer: B/C", 0),
    ("Answer: (B), (C)", 0),
    ("Answer: **B** and **C**", 0),
    ("Answer: Both", 0),
    ("Answer: b", 0),
    ("Answer: BC", 0),
    ("Answer: the letter B", 0),
    ("B", 0),
    ("Answer: B-52", 0),
    ("answer B", 0),
    ("", 0),
    ("ANSWER: B", 1),
    ("answer: B", 1),
    ("**Answer**: B", 1),
    ("The answer is (B)", 1),
    ("The answer is (B). A gas has no shape.", 1),
    ("The correct answer is: **B**.", 1),
    ("The answer is option B", 1),
    ("So it is \\boxed{B}.", 1),
    ("So it is $\\boxed{\\text{(B)}}$", 1),
    ("I first took \\boxed{A}, but it is \\boxed{B}", 1),
    ("<think>Answer: A</think><answer>B</answer>", 1),
    ("<answer>The answer is B</answer>", 1),
    ("Answer: B <answer>a gas</answer>", 1),
    ("Answer: B. This answer is supported by A.", 1),
    ("Answer: A. No, the answer is B.", 1),
    ("The answer is B. Wait, the answer is not B.", 0),
    ("The answer is B. Wait, the answer isn't B.", 0),
    ("The answer is A or B", 0),
    ("The answer is A gas", 0),
    ("Answer: B. The answer is A gas", 1),
    ("\\boxed{B + C}", 0),
    ("\\boxed{BC}", 0),
    ("\\boxed{A}, \\boxed{42}", 0),
    ("<answer>B or C</answer>", 0),
    ("<answer>A</answer> Answer: B", 0),
    ("The answer is b", 0),
    ("Answer: \\(B\\)", 1),
    ("The answer is \\(\\text{B}\\).", 1),
    ("Answer: \\[ B \\]", 1),
    ("Answer: \\(B\\) or \\(C\\)", 0),
    ("Answer: \\text{B} or \\text{C}", 0),
    ("Answer: Option B", 1),
    ("**Answer:** option (B)", 1),
    ("The answer is: **Option B**", 1),
    ("\\boxed{\\text{Option B}}", 1),
    ("Answer: Option B or option C", 0),
    ("Answer: optional B", 0),
  ],
)
def test_choice(text, expected):
  for gold in ("B", "(B)", " B. "):
    assert score("choice", text, answer=gold) == expected


def test_choice_with_another_marker_and_another_gold():
  assert score("choice(marker='####')", "x #### C", answer="C") == 1
  assert score("choice(marker='####')", "The answer is C. ANSWER: C", answer="C") == 0
  assert score("choice", "Answer: 7", answer="7") is None
  assert score("choice", "Answer: B", answer=None) is None


@pytest.mark.parametrize("name", ["math", "reasoning_accuracy"])
@pytest.mark.parametrize(
  "tail, gold, expected",
  [
    ("<answer>42</answer>", "42", 1),
    ("<answer> 42 apples </answer>", "42", 1),
    ("<answer>\n42\n</answer> Done.", "42", 1),
    ("<answer>The answer is 42.</answer>", "42", 1),
    ("<answer>You need $42$ apples.</answer>", "42", 1),
    ("<answer>\\pi</answer>", "\\pi", 1),
    ("<answer>(1,2)</answer>", "(1,2)", 1),
    ("<answer>\\boxed{42}</answer>", "42", 1),
    ("\\boxed{41} <answer>42</answer>", "42", 1),
    ("<answer>42</answer> or \\boxed{41}", "42", 1),
    ("<answer>41</answer><answer>42</answer>", "42", 1),
    ("<answer>41</answer> \\boxed{42}", "42", 0),
    ("<answer></answer> 42", "42", 0),
    ("<answer>41 or 42</answer>", "42", 0),
    ("<answer>42, 43</answer>", "42", 0),
  ],
)
def test_math_reads_what_stands_in_answer_tags(name, tail, gold, expected):
  pytest.importorskip("math_verify")
  assert score(name, f"<think>Is it 41?</think>{tail}", answer=gold) == expected


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize(
  "text, expected",
  [
    ('{"n": 1}', 1),
    ('{"n": 1.5}', 0),
    ("{}", 0),
    ("n = 1", 0),
    ('{"n": NaN}', 0),
    ('Here:\n```json\n{"n": 1}\n```\nDone.', 1),
    ('```json\n{}\n```\n```json\n{"n": 2}\n```', 1),
    ('```python\nprint(1)\n```\nHence:\n```json\n{"n": 1}\n```\n', 1),
    ('```python\n```\n```json\n{"n": 1}\n```', 1),
    ('```json\n{"n": 1}\n```\n```python\nprint(1)\n```', 0),
    ('```JSON\n{"n": 1}\n```', 1),
    ('The answer is: ```json\n{"n": 1}\n```', 1),
    ('Write ```x``` here:\n````json title=n\n{"n": 1}\n````', 1),
    ('Here: {"n": 1}', 0),
    ("[" * 100_000, 0),
    ('{"n": ' + "1" * 5000 + "}", 0),
    ("", 0),
  ],
)
def test_json_schema(tmp_path, text, expected):
  (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
  assert score(f"json_schema(file='{tmp_path}/schema.json')", text) == expected
  assert score("json_schema", text, schema=SCHEMA) == expected
  assert score("json_schema", text, schema=json.dumps(SCHEMA)) == expected


def test_json_schema_without_a_schema(tmp_path, monkeypatch):
  assert score("json_schema", "{}", schema=None) is None
  with pytest.raises(ConfigError, match="needs a column `schema`, or a file"):
    scores("json_schema", ["{}"])
  with pytest.raises(ConfigError, match="not a JSON Schema: 'thing' is not valid"):
    score("json_schema", "{}", schema={"type": "thing"})
  (tmp_path / "bad.json").write_text("{")
  with pytest.raises(ConfigError, match="bad.json'.: the schema is not JSON"):
    scores(f"json_schema(file='{tmp_path}/bad.json')", ["{}"])
  monkeypatch.setitem(sys.modules, "jsonschema", None)
  with pytest.raises(ConfigError, match="needs the package jsonschema: pip install"):
    scores("json_schema", ["{}"])


def test_json_schema_knows_only_what_json_has():
  assert scores("json_schema", ["1", "NaN", "Infinity"], schema=[{"type": "number"}] * 3) == [
    1,
    0,
    0,
  ]


def test_json_schema_asks_no_server():
  with socket.create_server(("127.0.0.1", 0)) as server:
    server.settimeout(0.3)
    address = f"http://127.0.0.1:{server.getsockname()[1]}/schema.json"
    asking = threading.Thread(
      target=score, args=("json_schema", "{}"), kwargs={"schema": {"$ref": address}}, daemon=True
    )
    asking.start()
    with pytest.raises(TimeoutError):
      server.accept()
    asking.join(5)
  assert score("json_schema", "{}", schema={"$ref": address}) == 0


LONG = 300_000
HOSTILE = [
  "<think>" * LONG,
  "</think>" * LONG,
  "<answer>" * LONG,
  "#### " * LONG,
  "Answer:" * LONG,
  "Answer:" + " " * LONG,
  "Answer: A" + ", " * LONG,
  "a " * LONG,
  "((((" * LONG,
]


LINEAR = [name for name, function in REWARDS.items() if has_mark(function, "in_process")]


@pytest.mark.parametrize("name", LINEAR)
def test_the_time_of_linear_functions_is_linear(name):
  columns = {
    "answer": "3" if name == "worked_steps" else "B",
    "question": "1+2=",
    "numbers": [1, 2],
    "target": 3,
    "turn_rewards": [1.0, None],
    "completion_ids": [1, 2, 3],
  }
  for text in HOSTILE:
    start = time.process_time()
    score(name, text, **columns)
    assert time.process_time() - start < 2, text[:20]


def test_workers_call_what_can_take_long():
  others = set(REWARDS) - set(LINEAR)
  slow = {"code", "cosine", "ifeval", "json_schema", "judge", "math", "reasoning_accuracy"}
  assert others == slow | {"reasoning_gym", "regex"}


def test_no_function_needs_a_column_that_it_does_not_read():
  names = ("think_format", "tag_count", "regex(pattern='.*')")
  for name, count in itertools.product(names, (0, 1, 3)):
    assert scores(name, ["x"] * count, question=["?"] * count) in ([0] * count, [1] * count)


@pytest.mark.parametrize("wrong", [None, [], ["72"], {"value": 72}])
@pytest.mark.parametrize(
  "name",
  ["strict", "flexible", "boxed", "math", "choice", "reasoning_accuracy", "cosine"]
  + ["reasoning_accuracy(scorer='strict')", "cosine(scorer='flexible')"],
)
def test_a_row_without_a_readable_answer_is_not_scored(name, wrong):
  text = "<think>so</think> It is \\boxed{72}.\n#### 72"
  found = scores(name, [text, "no", text, text], answer=[wrong, wrong, "72", 72])
  assert found[:2] == [None, None]
  right = {"choice": None, "cosine": 1.0}.get(name.partition("(")[0], 1.0)
  assert found[2:] == [pytest.approx(right, abs=0.01) if right else None] * 2


def test_other_columns_that_cannot_be_read_are_not_scored():
  for numbers, target in ((None, 3), ([1, 2], None), ("12", 3), ([1, "2"], 3), ([1, 2], [3])):
    assert score("countdown", "#### 1+2", numbers=numbers, target=target) is None
  steps = score("worked_steps", "1+2=3;#### 3", question="1+2=", answer=None)
  assert steps == [(6, 1.0)]  # the answer's own step is not scored
