"""Parameters of reward functions, as a config writes them."""

import importlib.util
import inspect
import os
import pickle

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from grpo_jax import calls, rewards
from grpo_jax.config import Config, to_dict
from grpo_jax.recipes import with_absolute_paths
from grpo_jax.settings import ConfigError
from grpo_jax.storage import saved_config

KEY = "reward.functions"


def resolve(name):
  return rewards.resolve(name, KEY, lambda name: False)


def write(folder, text):
  (folder / "mine.py").write_text(text)
  return f"{folder}/mine.py"


@pytest.mark.parametrize(
  "name, function, values",
  [
    ("strict", "strict", {}),
    ("cosine(max_length=512)", "cosine", {"max_length": 512}),
    ("f( a = -1 , b='x, y=1)', )", "f", {"a": -1, "b": "x, y=1)"}),
    ("my/file.py:f(a=[1, 2.5], b=None, c=True)", "my/file.py:f", dict(a=[1, 2.5], b=None, c=True)),
    ("f()", "f", {}),
    (r"regex(pattern=r'\bdef (\w+)\(\)')", "regex", {"pattern": r"\bdef (\w+)\(\)"}),
    ("f(a='(')", "f", {"a": "("}),
  ],
)
def test_parameters_are_read(name, function, values):
  assert calls.parse(name, KEY) == (function, values)
  assert "".join(calls.split(name)) == name


@pytest.mark.parametrize(
  "name",
  [
    "f(1)",
    "f(a)",
    "f(a=b)",
    "f(a=1",
    "f(a=1)(b=2)",
    "f(**{'a': 1})",
    "f(a=1, a=2)",
    "f(a=open('x'))",
  ]
  + ["f(a=1));x=(2)", f"f(a={'[' * 2000}{']' * 2000})"],
)
def test_what_is_no_parameter_is_one_line(name):
  if calls.split(name)[1]:
    with pytest.raises(ConfigError, match="reward.functions: .*write parameters as f.name=value"):
      calls.parse(name, KEY)
  else:  # not a call, so it is a name that nobody has
    with pytest.raises(ConfigError, match="is unknown"):
      resolve(name)


@settings(max_examples=50)
@given(st.text(max_size=60))
def test_any_text_is_a_name_or_one_line(text):
  try:
    resolve(text)
  except ConfigError as error:
    assert "\n" not in str(error).replace(text, "")


@pytest.mark.parametrize(
  "name, error",
  [
    ("cosine(max_len=5)", r"cosine\(max_len=...\): did you mean max_length\?"),
    ("cosine(zzz=5)", "it has the parameters max_length, right_short"),
    ("strict(zzz=5)", "it has no parameters"),
    ("cosine(completion_ids=[])", "it has the parameters"),
    ("cosine(max_length=0)", "max_length is out of its range: it must be at least 1"),
    ("cosine(max_length=1.5)", r"cosine\(max_length=1.5\): max_length must be a whole number"),
    ("cosine(max_length=True)", "must be a whole number"),
    ("cosine(right_short='1')", "right_short must be a number"),
    ("cosine(scorer='judge')", "choose one of 'math', 'strict'"),
    ("repetition(penalty=0.5)", "it must be at most 0"),
    ("soft_overlong(max_length=10, margin=11)", "margin must be at most max_length = 10"),
    ("regex", "regex needs a pattern"),
    ("regex(pattern='(')", "it is no regular expression"),
    ("choice(marker='')", "give what stands before the letter"),
    ("reasoning_accuracy(delimiter='')", "give what ends the reasoning"),
    ("countdown(format_score=2)", "at least 0 and at most 1"),
    ("strict(name='a b')", "name must be letters"),
    ("judge", "give the address of the judge"),
    ("judge(url='http://x/v1')", "give the judge's name"),
    ("judge(url='http://x/v1', model='m', pattern='1')", "it needs a group"),
    ("judge(url='http://x/v1', model='m', prompt_file='/no')", "it cannot be read"),
    ("json_schema(file='/no')", "it cannot be read"),
  ],
)
def test_a_bad_parameter_is_named(name, error):
  with pytest.raises(ConfigError, match=f"^reward.functions: .*{error}"):
    resolve(name)


def test_a_scorer_that_is_not_installed_is_named(monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  for name in ("cosine", "reasoning_accuracy"):
    with pytest.raises(ConfigError, match="scorer='math'. needs the package math-verify"):
      resolve(name)
    assert resolve(f"{name}(scorer='strict')")


def test_a_parameter_reaches_the_function():
  ids = [[1] * 50]
  cosine = resolve("cosine(max_length=100, scorer='strict', right_long=0)")
  columns = {"completions": ["#### 1"], "answer": ["1"], "completion_ids": ids}
  assert cosine(**columns) == pytest.approx([0.5])
  # A whole number may stand for a number, and a column of the data set is no parameter.
  assert cosine(**columns, max_length=[3]) == pytest.approx([0.5])
  assert resolve("cosine(scorer='strict')")(**columns, right_short=["x"])[0] > 0.9


def test_a_function_of_a_user_has_parameters_too(tmp_path):
  path = write(
    tmp_path,
    "def short(completions, *, scale=1.0, **columns):\n"
    "  return [-scale * len(text) for text in completions]\n"
    "async def later(completions, scale=1.0, **columns):\n  return []\n"
    "class Stateful:\n  def __call__(self, completions, size=2, **columns):\n    return [size]\n"
    "stateful = Stateful()\n"
    "def optional(completions, answer=None, **columns): return [answer]\n",
  )
  short = resolve(f"{path}:short(scale=0.5)")
  assert short(completions=["abcd"], scale=[9]) == [-2.0]
  assert rewards.name_of(short) == "short"
  assert resolve(f"{path}:stateful(size=7)")(completions=["a"]) == [7]
  with pytest.raises(ConfigError, match=r"short\(sale=...\): did you mean scale"):
    resolve(f"{path}:short(sale=1)")
  with pytest.raises(ConfigError, match="scale must be a number"):
    resolve(f"{path}:short(scale='a')")
  with pytest.raises(ConfigError, match="defines no function 'none'"):
    resolve(f"{path}:none(scale=1)")
  # Without parameters a function is called as it is: a default may stand for a column.
  assert resolve(f"{path}:optional")(completions=["a"], answer=["1"]) == [["1"]]


def test_two_uses_of_a_function_have_two_names():
  names = ("regex(pattern='a', name='has_a')", "regex(pattern='b')", "strict")
  functions = rewards.resolve_all(names, None, lambda name: False)
  assert [rewards.name_of(function) for function in functions] == ["has_a", "regex", "strict"]
  with pytest.raises(ConfigError, match="two functions have the same name.*parameter name"):
    rewards.resolve_all(("regex(pattern='a')", "regex(pattern='b')"), None, lambda name: False)


def test_a_function_with_parameters_travels_to_another_process():
  cosine = pickle.loads(pickle.dumps(resolve("cosine(max_length=100, scorer='strict')")))
  scores = cosine(completions=["#### 1"], answer=["1"], completion_ids=[[1] * 100])
  assert scores == pytest.approx([0.5])
  assert rewards.name_of(cosine) == "cosine"


def test_a_function_with_parameters_keeps_its_marks(tmp_path):
  path = write(
    tmp_path,
    "class Group:\n"
    "  whole_groups = True\n"
    "  def __call__(self, completions, size=2, **columns): return [size]\n"
    "group = Group()\n"
    "async def later(completions, size=2, **columns): return [size]\n",
  )
  assert resolve(f"{path}:group(size=3)").whole_groups
  assert not hasattr(resolve(f"{path}:group(size=3)"), "in_process")
  assert inspect.iscoroutinefunction(resolve(f"{path}:later(size=3)"))


def test_arguments_are_checked_behind_parameters():
  cosine = resolve("cosine(max_length=100)")
  rewards.check_arguments(cosine, "cosine", KEY, ["completions", "answer", "completion_ids", "x"])
  error = r"cosine\(completions, answer, completion_ids, \*\*columns\) cannot be called"
  with pytest.raises(ConfigError, match=f"{error} .missing a required argument: 'answer'"):
    rewards.check_arguments(cosine, "cosine", KEY, ["completions", "completion_ids"])


def test_paths_become_absolute_before_parameters(tmp_path, monkeypatch):
  write(tmp_path, "def f(completions, a='', **columns): return [0.0]\n")
  monkeypatch.chdir(tmp_path)
  long = "x: (y) " * 100
  changes = {"reward.functions": (f"mine.py:f(a='{long}')",), "eval.function": "mine.py:f(a='b:c')"}
  config = with_absolute_paths(Config().replace(changes))
  assert config.reward.functions == (f"{tmp_path}/mine.py:f(a='{long}')",)
  assert config.eval.function == f"{tmp_path}/mine.py:f(a='b:c')"
  assert resolve(config.eval.function)


def test_workers_call_functions_with_parameters(tmp_path):
  path = write(
    tmp_path,
    "import os\n"
    "def here(completions, *, home=0, **columns): return [float(os.getpid() != home)] * 2\n",
  )
  names = (f"{path}:here(home={os.getpid()})", "cosine(max_length=10, scorer='strict')")
  functions = rewards.resolve_all(names, None, lambda name: False)
  pool = rewards.Pool(count=1, timeout=20.0, memory=0.0)
  caller = rewards.Caller(pool)
  try:
    assert caller.add(dict(zip(names, functions))) == ()
    columns = {
      "completions": ["#### 1", "#### 2"],
      "answer": ["1", "1"],
      "completion_ids": [[0] * 5, [0] * 10],
    }
    answers = caller.start(functions, columns, 0, 2)
    found = [[steps[0][1] for steps in answer.result().steps] for answer in answers]
    assert found == [[1.0, 1.0], pytest.approx([0.75, -0.5])]
  finally:
    caller.close()


def test_files_of_environments_and_a_teacher_are_found_from_any_folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for name in ("env.py", "tool.py", "play.py", "models/teacher/config.json"):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).touch()
  given = {
    "environment.name": "sums=env.py:Sums(top=3), products=retry(tries=2)",
    "environment.tools": ("calculator", "tool.py:add", "mcp:python tool.py"),
    "environment.harness": "play.py:play",
    "reward.teacher": "models/teacher",
  }
  config = with_absolute_paths(Config().replace(given))
  assert config.environment.name == f"sums={tmp_path}/env.py:Sums(top=3),products=retry(tries=2)"
  assert config.environment.tools == ("calculator", f"{tmp_path}/tool.py:add", "mcp:python tool.py")
  assert config.environment.harness == f"{tmp_path}/play.py:play"
  assert config.reward.teacher == f"{tmp_path}/models/teacher"
  assert with_absolute_paths(config) == config
  # A run of an earlier version has some of these as they were given.
  old = to_dict(config)
  old["environment"]["harness"], old["reward"]["teacher"] = "play.py:play", "models/teacher"
  saved_config.check_same_run(tmp_path / "config.json", old, to_dict(config))
