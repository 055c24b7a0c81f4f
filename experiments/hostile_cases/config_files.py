# ruff: noqa: E501  (a row is a line)
"""Config files: other people's Python, which runs at the start."""

from hostile_cases.case import Case, fifo

HEAD = (
  "from grpo_jax.configs import default\n"
  "def get_config(preset='grpo'):\n  c = default.get_config(preset)\n"
)


def _file(
  name: str, content: str | bytes, *words: str, code: int | tuple[int, ...] = 2, file: str = "c.py"
) -> Case:
  return Case(
    f"config/{name}", f"train --config={file} --workdir=run", code, words, files={file: content}
  )


def _body(name: str, line: str, *words: str, code: int | tuple[int, ...] = 2) -> Case:
  """The tiny config with one more line in get_config."""
  content = (
    "import tiny\n\ndef get_config(preset='grpo'):\n  c = tiny.get_config(preset)\n"
    f"  {line}\n  return c\n"
  )
  case = _file(name, content, *words, code=code)
  return case


def _trl(name: str, fields: str, *words: str, code: int | tuple[int, ...] = 2) -> Case:
  """A config that reads as TRL's GRPOConfig."""
  source = f"from grpo_jax import from_trl\ndef get_config():\n  return from_trl({fields})\n"
  return _file(name, source, *words, code=code)


CASES = [
  Case(
    "config/recipe by name",
    "cd own && train --config=countdown --config.steps=x --workdir=run",
    2,
    ("config key steps must be a whole number",),
    files={"own/configs/__init__.py": "", "own/countdown/x": ""},
  ),
  Case("config/no such recipe", "train --config=gsm9k --workdir=run", 2, ("gsm8k, gsm8k_lora",)),
  _trl("trl unknown field", "dict(num_generation=4)", "did you mean num_generations?"),
  _trl("trl refused field", "dict(max_steps=1, repetition_penalty=2.0)", "repetition_penalty=2.0"),
  _trl("trl without steps", "{}", "max_steps=-1", "set max_steps"),
  _trl("trl without a model's tokenizer", "dict(max_steps=1), model='none'", "none"),
  _file("syntax error", "def get_config(:\n", "c.py", "line 1"),
  _file("null bytes", b"\x00\x00\x00", "c.py"),
  _file("utf-8 with a mark", b"\xef\xbb\xbfdef get_config():\n  return 3\n", "ConfigDict"),
  _file(
    "get_config returns a dict",
    "def get_config(): return {'steps': 1}\n",
    "must return a ConfigDict",
  ),
  _file("get_config is async", "async def get_config(): return 1\n", "must return a ConfigDict"),
  _file(
    "missing name", "from configs import nosuch\n", "c.py line 1", "nosuch", "grpo_jax.configs"
  ),
  _file("exit with a text", "import sys\ndef get_config(): sys.exit('enough')\n", "c.py"),
  _body("unknown key", "c.algo.clip = 0.2", "algo.clip", "did you mean"),
  _body("none for a number", "c.steps = None", "steps"),
  _body(
    "placeholder",
    "c.data.path = __import__('ml_collections').config_dict.placeholder(str)",
    "data.path",
  ),
  _body("tuple of tuples", "c.reward.functions = (('strict',),)", "reward.functions"),
  Case(
    "config/fifo",
    "train --config=c.py --workdir=run",
    2,
    ("c.py",),
    setup=(fifo("c.py"),),
    limit=40,
  ),
  Case("config/dev null", "train --config=/dev/null --workdir=run", 2, ("/dev/null",)),
]
