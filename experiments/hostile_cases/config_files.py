# ruff: noqa: E501  (a row is a line)
"""Config files: other people's Python, which runs at the start."""

from hostile_cases.case import Case, fifo

HEAD = (
  "from configs import default\ndef get_config(preset='grpo'):\n  c = default.get_config(preset)\n"
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


CASES = [
  _file("syntax error", "def get_config(:\n", "c.py", "line 1"),
  _file("null bytes", b"\x00\x00\x00", "c.py"),
  _file("utf-8 with a mark", b"\xef\xbb\xbfdef get_config():\n  return 3\n", "ConfigDict"),
  _file(
    "get_config returns a dict",
    "def get_config(): return {'steps': 1}\n",
    "must return a ConfigDict",
  ),
  _file("get_config is async", "async def get_config(): return 1\n", "must return a ConfigDict"),
  _file("missing name", "from configs import nosuch\n", "c.py line 1", "nosuch"),
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
