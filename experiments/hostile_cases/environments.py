# ruff: noqa: E501  (a row is a line)
"""Environments, tools and harnesses: programs of users that run beside the policy."""

from typing import Any

from hostile_cases.case import Case

_PLAY = (
  "train --config=tiny.py --workdir=run --config.environment.name=env.py:Env"
  " --config.reward.functions=\"('environment',)\" --config.eval.every=0"
  " --config.sampling.max_tokens=12 --config.environment.turn_tokens=4"
)
_HERE = _PLAY + " --config.reward.workers=0"
_NONE = _PLAY + " --config.reward.on_error=none"
_FINE = {
  "reset": "return []",
  "step": "return [], float(len(message['content'])), True",
  "close": "pass",
}
_ARGUMENTS = {
  "__init__": "self",
  "reset": "self, example",
  "step": "self, message",
  "close": "self",
}


def _env(
  name: str, bodies: dict[str, str], code: int | tuple[int, ...], *words: str, **more: Any
) -> Case:
  """An environment with these methods, one line each, in place of those of a fine one."""
  source = "import asyncio, os, sys\nimport numpy as np\nsteps = 0\nclass Env:\n"
  for method, body in (_FINE | bodies).items():
    source += f"  def {method}({_ARGUMENTS[method]}):\n    global steps\n    {body}\n"
  files = {"env.py": source, **more.pop("files", {})}
  return Case(f"environment/{name}", more.pop("command", _PLAY), code, words, files=files, **more)


_AT_9 = "steps += 1\n    if steps > 8: sys.exit(0)\n    "  # a step of the run has 8 completions
_SOME = "if '3' in example['question']: {}\n    return []"
EXITS = [
  _env("exits in its constructor", {"__init__": "sys.exit(0)"}, 2, "__init__() of env.py:Env raised SystemExit: 0", "env.py line", "for the example"),
  _env("exits in reset", {"reset": "sys.exit(0)"}, 2, "reset() of env.py:Env raised SystemExit: 0", "for the example"),
  _env("exits with quit", {"reset": "quit()"}, 2, "reset() of env.py:Env raised SystemExit"),
  _env("exits in close", {"close": "sys.exit(0)"}, 2, "close() of env.py:Env raised SystemExit: 0"),
  _env("exits in a worker", {"step": "sys.exit(0)"}, 1, "the environment raised SystemExit: 0"),
  _env("exits at step 2", {"step": _AT_9 + _FINE["step"]}, 1, "the environment raised SystemExit: 0", "step 1 is saved", command=_HERE, saved=1),
  _env("exits for some examples", {"reset": _SOME.format("sys.exit(0)")}, 0, "raised SystemExit: 0", "it is left out", "training prompts cannot begin", "others stand in for them", command=_NONE),
  _env("raises for some examples", {"reset": _SOME.format("raise ValueError('no board')")}, 0, "raised ValueError: no board", "it is left out", command=_NONE),
  _env("raises for some examples and stops", {"reset": _SOME.format("raise ValueError('no board')")}, 2, "raised ValueError: no board", "with reward.on_error=none it would be left out"),
  _env("raises for every example", {"reset": "raise ValueError('no board')"}, 2, "it can begin with no other of all 12 examples", command=_NONE),
  _env("exits in an evaluation", {"reset": "sys.exit(0)"}, 2, "reset() of env.py:Env raised SystemExit: 0", command="evaluate --config=tiny.py --config.model.path=model --config.environment.name=env.py:Env", needs="model"),
]  # fmt: skip


def _returns(name: str, value: str, code: int, *words: str, **more: Any) -> Case:
  return _env(f"returns {name}", {"step": f"return {value}"}, code, *words, **more)


RETURNS = [
  _returns("a reward of nan", "[], float('nan'), True", 1, "the environment returned the reward nan"),
  _returns("a reward of inf", "[], np.inf, True", 1, "the environment returned the reward inf"),
  _returns("a huge reward", "[], 10**400, True", 1, "the environment returned the reward"),
  _returns("a reward as text", "[], '1', True", 1, "the environment returned the reward '1'"),
  _returns("a list of rewards", "[], [1.0], True", 1, "the environment returned the reward [1.0]"),
  _returns("done as text", "[], 1.0, 'False'", 1, "the environment returned done='False': give True or False"),
  _returns("no done", "[], 1.0", 1, "return (messages, reward, done)"),
  _returns("a message of None", "{'role': 'user', 'content': None}, 1.0, False", 1, "a text role and a text content"),
  _returns("no winner yet", "[], 1.0, None", 0, "finished"),
  _returns("numpy", "[], np.float32(len(message['content'])), np.bool_(True)", 0, "finished"),
  _returns("half of a surrogate pair", "'a\\ud800b', 1.0, False", 0, "finished"),
  _returns("nan for all if asked", "[], float('nan'), True", 1, "the completion ends there", "the last 3 GRPO steps had nothing to learn from", command=_NONE, saved=3),
  _env("begins with half of a surrogate pair", {"reset": "return 'a\\ud800b'"}, 0, "finished", "a?b"),
  _env("begins with nothing", {"reset": "pass"}, 0, "finished"),
  _env("begins with 20,000 characters", {"reset": "return 'ab' * 10000"}, 2, "drops all 12 prompts"),
]  # fmt: skip


def _tool(name: str, head: str, body: str, code: int, *words: str, hint: str = "str") -> Case:
  """A tool that a random model calls with any digit."""
  source = (
    f"import sys, typing\nclass Mute(Exception):\n  def __str__(self): raise KeyError\n"
    f"def tool({head.format(hint=hint)}):\n  '''Does it.\n\n  Args:\n    x: A digit.\n  '''\n  {body}\n"
  )
  command = (
    "train $RUN --config.eval.every=0 --config.sampling.max_tokens=12 --config.environment.tools=\"('env.py:tool',)\""
    " --config.environment.calls='(?P<arguments>[0-9])' --config.environment.turn_tokens=4"
  )
  return Case(f"environment/tool {name}", command, code, words, files={"env.py": source})


TOOLS = [
  _tool("whose exception has no text", "x: {hint}", "raise Mute", 0, "finished"),
  _tool("that exits", "x: {hint}", "sys.exit(0)", 0, "finished"),
  _tool("with typing.List", "x: {hint}", "return 1", 0, "finished", hint="typing.List"),
  _tool("with typing.Dict", "x: {hint}", "return 1", 0, "finished", hint="typing.Dict"),
  _tool("with *args", "*x: {hint}", "return 1", 2, "the argument *x: str cannot be given by name"),
  _tool("with **kwargs", "**x: {hint}", "return 1", 2, "the argument **x: str cannot be given by name"),
  _tool("by position", "x: {hint}, /", "return 1", 2, "the argument x: str cannot be given by name"),
]  # fmt: skip


def _harness(name: str, end: str, code: int, *words: str, **more: Any) -> Case:
  source = (
    "import asyncio, sys\nimport openai\nasync def play(example, base_url, api_key, model):\n"
    "  client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)\n"
    "  even = int(api_key[-1]) % 2 == 0\n  prompt = example['prompt_text']\n"
    f"  {end}\n"
  )
  command = more.pop("command", "train $RUN --config.reward.workers=0") + (
    " --config.eval.every=0 --config.environment.harness=env.py:play"
    " --config.reward.functions=\"('environment',)\""
  )
  return Case(f"environment/harness {name}", command, code, words, files={"env.py": source}, **more)


_ASK = "async with client:\n    await client.completions.create(model=model, prompt=prompt, max_tokens=4)\n  "
HARNESSES = [
  _harness("exits", _ASK + "sys.exit(0)", 1, "the harness raised SystemExit: 0"),
  _harness("exits in a worker", _ASK + "sys.exit(0)", 1, "the harness raised SystemExit: 0", command="train $RUN --config.reward.workers=1"),
  _harness("exits in a task", _ASK + "await asyncio.create_task(asyncio.to_thread(sys.exit, 0))", 1, "SystemExit: 0"),
  _harness("exits in a task of half of the completions", _ASK + "await asyncio.gather(*[asyncio.to_thread(sys.exit, 0)] if even else [])\n  return 1.0", 0, "the harness failed 4 times", "finished", command="train $RUN --config.reward.workers=0 --config.reward.on_error=none"),
  _harness("pays nan", _ASK + "return float('nan')", 1, "the harness returned the reward nan"),
  _harness("pays a text", _ASK + "return '1'", 1, "the harness returned the reward '1'"),
  _harness("fails before it asks", "if not even: raise ValueError('no game')\n  " + _ASK + "return 1.0", 0, "the harness failed 4 times", "finished", command="train $RUN --config.reward.workers=0 --config.reward.on_error=none"),
]  # fmt: skip

CASES = [*EXITS, *RETURNS, *TOOLS, *HARNESSES]
