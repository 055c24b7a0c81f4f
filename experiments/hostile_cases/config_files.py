# ruff: noqa: E501  (a row is a line)
"""Config files: other people's Python, which runs at the start."""

from hostile_cases.case import Case, fifo, link, make_folder, mode

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
  _file("indentation", "def get_config():\nreturn 1\n", "c.py", "line 2"),
  _file("empty", "", "c.py", "get_config"),
  _file("null bytes", b"\x00\x00\x00", "c.py"),
  _file("binary", bytes(range(256)), "c.py"),
  _file("latin-1", "# \xe9\n".encode("latin-1") + b"x = 1\n", "c.py"),
  _file("utf-8 with a mark", b"\xef\xbb\xbfdef get_config():\n  return 3\n", "ConfigDict"),
  _file("windows lines", "import tiny\r\nget_config = tiny.get_config\r\n", "finished", code=0),
  _file("get_config is a number", "get_config = 3\n", "get_config"),
  _file("get_config returns nothing", "def get_config(): pass\n", "must return a ConfigDict"),
  _file(
    "get_config returns a dict",
    "def get_config(): return {'steps': 1}\n",
    "must return a ConfigDict",
  ),
  _file(
    "get_config returns itself", "def get_config(): return get_config\n", "must return a ConfigDict"
  ),
  _file("get_config wants two values", "def get_config(a, b): return 1\n", "c.py"),
  _file("get_config is async", "async def get_config(): return 1\n", "must return a ConfigDict"),
  _file("get_config yields", "def get_config():\n  yield 1\n", "must return a ConfigDict"),
  _file("endless recursion", "def get_config(): return get_config()\n", "c.py", "RecursionError"),
  _file("missing package", "import nosuchpackage\n", "c.py line 1", "nosuchpackage"),
  _file("missing name", "from configs import nosuch\n", "c.py line 1", "nosuch"),
  _file(
    "error of many lines",
    "raise ValueError('one\\ntwo\\n' * 50)\n",
    "c.py line 1: ValueError: one two",
  ),
  _file(
    "error without words", "def get_config():\n  raise ValueError\n", "c.py line 2", "ValueError"
  ),
  _file(
    "error without a text",
    "class E(Exception):\n  def __str__(self): raise KeyError\ndef get_config():\n  raise E\n",
    "c.py",
  ),
  _file("error of megabytes", "raise ValueError('x' * 10**7)\n", "c.py line 1: ValueError: xxx"),
  _file("keyboard interrupt", "def get_config(): raise KeyboardInterrupt\n", code=(2, 130)),
  _file("assertion", "def get_config():\n  assert False\n", "c.py line 2: AssertionError"),
  _file("exit with a text", "import sys\ndef get_config(): sys.exit('enough')\n", "c.py"),
  _file("exit with code 3", "def get_config(): raise SystemExit(3)\n", "c.py"),
  _file(
    "empty config",
    "from ml_collections import ConfigDict\ndef get_config(): return ConfigDict({'steps': 0})\n",
    "finished",
    code=0,
  ),
  _file("other name", "import tiny\nget_config = tiny.get_config\n", code=(0, 2), file="c.txt"),
  _file("no suffix", "import tiny\nget_config = tiny.get_config\n", code=(0, 2), file="conf"),
  _file(
    "name of a library",
    "import tiny\nget_config = tiny.get_config\n",
    "finished",
    code=0,
    file="optax_config/jax.py",
  ),
  _file(
    "space and umlaut in the name",
    "import tiny\nget_config = tiny.get_config\n",
    "'",
    code=2,
    file="a'b.py",
  ),
  _body("unknown key", "c.algo.clip = 0.2", "algo.clip", "did you mean"),
  _body("unknown section", "c.trainer = dict(steps=1)", "trainer"),
  _body("text for a number", "c.update(steps='3')", "c.py line 5"),
  _body("none for a number", "c.steps = None", "steps"),
  _body("section is none", "c.algo = None", "algo"),
  _body("section is a list", "c = __import__('ml_collections').ConfigDict(dict(algo=[1]))", "algo"),
  _body("numpy number", "c.steps = __import__('numpy').int64(1)", code=(0, 2)),
  _body(
    "numpy array",
    "c = __import__('ml_collections').ConfigDict(dict(steps=__import__('numpy').ones(3)))",
    "steps",
  ),
  _body(
    "placeholder",
    "c.data.path = __import__('ml_collections').config_dict.placeholder(str)",
    "data.path",
  ),
  _body("reference", "c.batch.micro_batch = c.get_ref('steps')", code=(0, 2)),
  _body("frozen", "c = __import__('ml_collections').FrozenConfigDict(c)", "finished", code=0),
  _body("locked", "c.lock()", "finished", code=0),
  _body("prints", "print('hello\\n' * 1000)", "finished", code=0),
  _body("changes the folder", "import os; os.chdir('/')", code=(0, 2)),
  _body("changes the arguments", "import sys; sys.argv.clear()", "finished", code=0),
  _body("nan in a tuple", "c.reward.weights = (float('nan'),)", "reward.weights"),
  _body("bool for a number", "c.update(seed=True)", "seed"),
  _body("tuple of tuples", "c.reward.functions = (('strict',),)", "reward.functions"),
  _body(
    "set for a tuple",
    "c = __import__('ml_collections').ConfigDict(dict(reward=dict(functions={'strict'})))",
    "reward.functions",
  ),
  Case(
    "config/a folder",
    "train --config=c.py --workdir=run",
    2,
    ("c.py",),
    setup=(make_folder("c.py"),),
  ),
  Case(
    "config/fifo",
    "train --config=c.py --workdir=run",
    2,
    ("c.py",),
    setup=(fifo("c.py"),),
    limit=40,
  ),
  Case(
    "config/link to itself",
    "train --config=c.py --workdir=run",
    2,
    ("c.py",),
    setup=(link("c.py", "c.py"),),
  ),
  Case(
    "config/dev zero",
    "ulimit -v 30000000; train --config=/dev/zero --workdir=run",
    2,
    ("/dev/zero",),
    limit=40,
  ),
  Case("config/dev null", "train --config=/dev/null --workdir=run", 2, ("/dev/null",)),
  Case(
    "config/standard input",
    "train --config=/dev/stdin --workdir=run <<< 'x = 1'",
    2,
    ("/dev/stdin",),
  ),
  Case(
    "config/unreadable",
    "train --config=c.py --workdir=run",
    2,
    ("c.py",),
    files={"c.py": "x = 1"},
    setup=(mode("c.py", 0),),
    as_user=True,
  ),
  Case(
    "config/a module's name",
    "train --config=configs.arithmetic --workdir=run",
    2,
    ("no file 'configs.arithmetic'",),
  ),
]
