"""Environments as TRL's `environment_factory` takes them: their public methods are tools."""

import re
import sys

import pytest
from small_run import Collected, small_config, small_run, with_section

from grpo_jax.config import Data
from grpo_jax.data.prompts import PromptSet
from grpo_jax.environments import acting, make_environments, methods
from grpo_jax.scoring.scorers import Scorers
from grpo_jax.settings import ConfigError

# A run of digits in what the policy writes is a call of the only method.
DIGITS = r"(?P<arguments>\d+)"
# As TRL's documentation has them: reset gets the row, reward functions get the objects.
SAFE = '''
class Safe:
  def __init__(self, *, pays=1.0):
    self.pays = pays

  def reset(self, question, **columns):
    self.code, self.tried = question[0], []
    return "?"

  def dial(self, number: str) -> str:
    """Turns the dial.

    Args:
      number: Digits.
    """
    self.tried.append(number)
    if number == "0":
      raise ValueError("stuck")
    return "open" if self.code in number else "shut"

  def get_reward(self):
    return self.pays * len(self.tried)

  def _private(self):
    return 1

class Silent:
  def reset(self, **columns):
    pass

class Kept(Safe):
  pickles = False

class Breaks(Safe):
  def dial(self, number: str) -> str:
    """Turns the dial.

    Args:
      number: Digits.
    """
    self.tried.append(number)
    raise ValueError("broken")

class Waits(Safe):
  async def get_reward(self):
    return 2.0

def seen(completions, environments, **columns):
  return [float(len(one.tried)) for one in environments]

def messages(turns, **columns):
  return [float(sum(len(t.get("tool_calls", ())) for t in own)) for own in turns]
'''


def config_of(folder, name, functions=("environment",), **values):
  (folder / "env.py").write_text(SAFE)
  config = with_section(small_config(), "sampling", max_tokens=values.pop("T", 40))
  config = with_section(
    config, "environment", name=f"{folder}/env.py:{name}", calls=DIGITS, turn_tokens=6
  )
  functions = tuple(one if one == "environment" else f"{folder}/env.py:{one}" for one in functions)
  reward = dict(functions=functions, weights=(1.0,) * len(functions), workers=0) | values
  return with_section(config, "reward", **reward)


@pytest.mark.slow
def test_public_methods_are_tools_and_the_object_pays_and_is_seen(tmp_path):
  small = Collected(config_of(tmp_path, "Safe", ("environment", "seen", "messages")))
  decode = small.run.tokenizer.decode
  assert any(row["reward"] for row in small.rows)
  for row in small.rows:
    assert row["prompt"].endswith("?") and decode(row["prompt_ids"]) == row["prompt"]
    calls = [len(re.findall(DIGITS, turn["text"])) for turn in row["turns"] if "a" in turn["role"]]
    said = [turn["text"] for turn in row["turns"] if turn["role"] == "tool"]
    tried = row["rewards/seen"]
    assert row["rewards/environment"] == tried and row["rewards/messages"] == sum(calls)
    # The calls of the last turn are not made where nothing can follow it.
    assert len(said) <= tried <= sum(calls) and set(said) <= {"open", "shut", "error: stuck"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Safe", "Kept", "Waits"])
def test_workers_play_them_too(tmp_path, name):
  functions = ("environment",) if name == "Kept" else ("environment", "seen")
  rows = Collected(config_of(tmp_path, name, functions, workers=2)).rows
  here = rows if name == "Kept" else Collected(config_of(tmp_path, name, functions)).rows
  columns = ("completion_ids", "turns", "reward")
  assert [[row[x] for x in columns] for row in rows] == [[row[x] for x in columns] for row in here]


@pytest.mark.slow
def test_what_has_no_room_is_paid_for(tmp_path):
  """The answer of a method would fill the completion: it ends, and is paid what was done."""
  small = Collected(config_of(tmp_path, "Safe", ("environment", "seen"), T=9))
  full = [row for row in small.rows if row["rewards/seen"] and len(row["turns"]) == 1]
  assert full and all(row["reward"] == 2 * row["rewards/seen"] for row in full)


@pytest.mark.slow
@pytest.mark.parametrize("length", [9, 40])
def test_a_call_that_fails_is_counted_whether_its_answer_fits_or_not(tmp_path, length):
  """Calls of the last turn are not made, and count as calls that have not failed."""
  functions = ("environment", "seen", "messages")
  small = Collected(config_of(tmp_path, "Breaks", functions, T=length))
  failed, calls = (sum(row[f"rewards/{name}"] for row in small.rows) for name in functions[1:])
  assert 0 < failed <= calls
  assert small.metrics["tools/failure_frequency"] == pytest.approx(failed / calls)


def test_parameters_and_schemas(tmp_path):
  run = small_run(config_of(tmp_path, "Safe(pays=2)"))
  assert Scorers(run).talkers is not None
  (schema,) = run.environments.tools_of({})
  assert schema["function"]["name"] == "dial"
  assert [*schema["function"]["parameters"]["properties"]] == ["number"]
  parts = acting.load((), f"{tmp_path}/env.py:Safe(pays=2)")
  request = {"task": "", "example": {"question": "5"}, "is_first": True, "state": "", "key": "x"}
  call = {"tool": "dial", "arguments": {"number": "5"}}
  outcome = acting.outcome(parts, request | {"calls": [call] * 2, "is_last": True})
  assert [one["content"] for one in outcome["contents"]] == ["open"] * 2 and outcome["reward"] == 4


def test_reward_functions_do_not_execute_the_file_again(tmp_path):
  """That would also replace the class, whose objects could then not be pickled."""
  file, loads = tmp_path / "counted.py", tmp_path / "loads"
  file.write_text(f"open({str(loads)!r}, 'a').write('x')\n{SAFE}")
  name = f"{file}:Safe"
  parts = acting.load((), name)
  request = {"task": "", "example": {"question": "5"}, "is_first": True, "state": "", "key": "x"}
  request |= {"calls": [{"tool": "dial", "arguments": {"number": "5"}}], "is_last": True}
  pickled = methods.PickledEnvironment(name, acting.outcome(parts, request)["environment"])
  for _ in range(3):
    assert type(pickled.for_reward()) is parts.of_task("").func
  assert loads.read_text() == "x"
  module = parts.of_task("").func.__module__
  del sys.modules[module]  # as in a worker that has not loaded the file
  assert pickled.for_reward().__module__ == module and loads.read_text() == "xx"


def test_retry_finds_its_function_once(tmp_path):
  file, loads = tmp_path / "judge.py", tmp_path / "loads"
  file.write_text(
    f"open({str(loads)!r}, 'a').write('x')\n"
    "def right(completions, **_):\n  return [float(text == '5') for text in completions]\n"
  )
  parts = acting.load((), f"retry(function='{file}:right')")
  request = {"task": "", "example": {}, "is_first": True, "state": "", "key": "x"}
  turns = [{"role": "assistant", "content": text} for text in "465"]
  found = [acting.outcome(parts, request | {"message": one, "is_last": True}) for one in turns]
  assert [one["reward"] for one in found] == [0, 0, 1] and loads.read_text() == "x"


def test_a_class_without_methods_and_names_that_clash_are_refused(tmp_path):
  with pytest.raises(ConfigError, match="Silent has no method step, and no public method"):
    make_environments(config_of(tmp_path, "Silent"), None)
  (tmp_path / "tool.py").write_text(
    'def dial(x: str):\n  """Dials.\n\n  Args:\n    x: What.\n  """\n  return x\n'
  )
  config = config_of(tmp_path, "Safe")
  config = with_section(config, "environment", tools=(f"{tmp_path}/tool.py:dial",))
  with pytest.raises(ConfigError, match="a tool and a method of .*Safe are both called dial"):
    make_environments(config, None)


def test_what_reset_says_is_added_to_the_last_message():
  prompts = PromptSet.__new__(PromptSet)
  prompts._templates, prompts._data = {}, Data(chat=True, prompt="{question}", system="Be brief.")
  opening = methods.opening_of(" It has a dial.")
  system, user = prompts._conversation({"question": "A safe."}, opening)
  assert user == {"role": "user", "content": "A safe. It has a dial."}
  assert system["role"] == "system" and methods.opening_of(None) == []
  prompts._data = Data(chat=True, prompt="")
  assert prompts._conversation({}, opening) == [{"role": "user", "content": " It has a dial."}]
