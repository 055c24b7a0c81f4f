"""The notebooks of colabs/: they run from top to bottom, and their pages are complete."""

import ast
import functools
import importlib.metadata
from pathlib import Path
import re
import sys
import types

import nbformat
import pytest

import grpo_jax
from grpo_jax.console import notebook as progress
from tests.small_qwen import make_checkpoint, problems

FOLDER = Path(__file__).parents[1] / "colabs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
TINY = {"gsm8k_tpu"}  # stored outputs are of a tiny run


def read(name):
  return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code_cells(notebook):
  return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook, kind):
  found = [output for cell in code_cells(notebook) for output in cell.outputs]
  return [output for output in found if output.output_type == kind]


def texts(notebook, stream):
  return "".join(out.text for out in outputs(notebook, "stream") if out.name == stream)


def pictures(notebook):
  shown = outputs(notebook, "display_data") + outputs(notebook, "execute_result")
  return [output.data["image/png"] for output in shown if "image/png" in output.data]


def names_of_grpo_jax(code):
  """Every name of grpo_jax that code uses, and every module of it that it imports."""
  for node in ast.walk(ast.parse(re.sub(r"^( *)%.*$", r"\1pass", code, flags=re.M))):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names if alias.name.startswith("grpo_jax."))
    if isinstance(node, ast.ImportFrom) and node.module.startswith(("grpo_jax", "configs")):
      yield node.module
    if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "grpo_jax":
      yield node.attr


def test_there_are_four():
  assert NAMES == ["gsm8k_tpu", "quick_start", "read_a_run", "your_own"]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_a_complete_page(name):
  path = FOLDER / f"{name}.ipynb"
  assert path.stat().st_size < 300_000
  notebook = read(name)
  nbformat.validate(notebook)
  first = notebook.cells[0]
  assert first.cell_type == "markdown" and first.source.startswith("# ")
  for row in ("Needs", "Takes", "Shows"):
    assert f"| **{row}** | " in first.source
  assert ("from a tiny run" in first.source) == (name in TINY)
  assert name in TINY or "outputs below are those of" in first.source
  cells = code_cells(notebook)
  assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
  assert sum(bool(cell.outputs) for cell in cells) >= len(cells) / 2
  assert not outputs(notebook, "error") and not texts(notebook, "stderr")
  assert pictures(notebook)
  assert not re.search(r"/(tmp|home|root|Users)/|OWNER", path.read_text())


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_uses_public_names_only(name):
  used = {name for cell in code_cells(read(name)) for name in names_of_grpo_jax(cell.source)}
  assert {"train", "load_config"} <= used <= set(grpo_jax.__all__)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_stores_no_empty_answer(name):
  """An answer is a line of text above a line such as (16 tokens, cut off)."""
  assert not re.search(r"(^|\n)\n\(\d+ tokens", texts(read(name), "stdout"))


def install(name, folder, monkeypatch, source="", is_installed=False):
  """What the install cell of a notebook in this folder gives to pip. None for nothing."""
  cell = next(cell.source for cell in code_cells(read(name)) if "%pip" in cell.source)
  cell = re.sub(r'%pip install -q "(.*)"', r'given.append(f"\1")', cell)
  given = []
  monkeypatch.chdir(folder)
  with monkeypatch.context() as patched:
    found = [object()] if is_installed else []
    patched.setattr(importlib.metadata, "distributions", lambda name: found)
    exec(cell.replace('SOURCE = ""', f"SOURCE = {source!r}"), {"given": given})
  return given[0] if given else None


@pytest.mark.parametrize("name", NAMES)
def test_the_install_cell_finds_what_lies_beside_the_notebook(name, tmp_path, monkeypatch):
  def installs(folder, **options):
    found = install(name, folder, monkeypatch, **options)
    extras, _, address = (found or "").partition(" @ ")
    assert not found or re.fullmatch(r"grpo_jax\[(tpu,)?notebooks\]", extras)
    return address

  assert not installs(tmp_path, is_installed=True)
  with pytest.raises(FileNotFoundError, match="upload the wheel that `pip wheel .* or give SOURCE"):
    installs(tmp_path)
  assert installs(tmp_path, source="git+https://a/b") == "git+https://a/b"
  assert installs(tmp_path, source="a b") == (tmp_path / "a b").as_uri()
  checkout = FOLDER.parent
  assert installs(FOLDER) == installs(checkout) == checkout.as_uri()  # where notebooks lie here
  (tmp_path / "grpo_jax/grpo_jax").mkdir(parents=True)
  (tmp_path / "grpo_jax/grpo_jax/__init__.py").write_text("")
  assert installs(tmp_path) == (tmp_path / "grpo_jax").as_uri()  # a checkout that was uploaded
  for version in ("0.1.0", "0.2.0"):
    (tmp_path / f"grpo_jax-{version}-py3-none-any.whl").write_text("")
  assert installs(tmp_path).endswith("/grpo_jax-0.2.0-py3-none-any.whl")


def test_what_the_test_of_public_names_sees():
  code = "import grpo_jax.cli\nfrom configs import gsm8k\nif True:\n  %pip install x\ngrpo_jax.f()"
  assert list(names_of_grpo_jax(code)) == ["grpo_jax.cli", "configs", "f"]


def test_the_bar_is_one_output_that_changes(monkeypatch):
  display = types.ModuleType("IPython.display")
  shown = []

  class Handle:
    def update(self, content, raw):
      shown.append(("update", content))

  def show(content, raw, display_id):
    shown.append(("new", content))
    return Handle()

  display.display = show
  monkeypatch.setitem(sys.modules, "IPython.display", display)
  bar = progress.Bar()
  task = bar.add_task("", total=4, completed=0, text="")
  bar.stop()
  assert not shown  # a run that fails at its start shows no bar
  for step in range(1, 4):
    bar.update(task, description=f"grpo {step}/4", completed=step, text="reward <b>")
    bar.start()
    bar.refresh()
  assert [kind for kind, _ in shown] == ["new"]  # the others came within half a second
  bar.update(task, below="prompt  completion")
  bar.doing = "step 4: sampling"
  bar.stop()
  assert shown.pop()[1]["text/plain"].endswith(" reward <b>\nstep 4: sampling\nprompt  completion")
  bar.doing = None
  bar.stop()
  bar.stop()
  kind, last = shown[-1]
  assert kind == "update" and len(shown) == 2
  assert last["text/plain"] == f"grpo 3/4 {'█' * 30}{'░' * 10} reward <b>\nprompt  completion"
  assert 'value="3" max="4"' in last["text/html"] and "reward &lt;b&gt;" in last["text/html"]


def test_only_a_kernel_is_a_notebook(monkeypatch):
  fake = types.ModuleType("IPython")
  for shell, expected in (
    (None, False),
    (object(), False),
    (types.SimpleNamespace(kernel=1), True),
  ):
    fake.get_ipython = lambda shell=shell: shell
    monkeypatch.setitem(sys.modules, "IPython", fake)
    assert progress.is_running() == expected
  monkeypatch.delitem(sys.modules, "IPython")
  assert not progress.is_running()


@pytest.fixture
def run(tmp_path, monkeypatch):
  """Runs a notebook with tiny settings, in a folder that has the model of the GSM8K notebook."""
  for package in ("nbclient", "ipykernel", "matplotlib"):
    pytest.importorskip(package, reason="pip install -e '.[notebooks]'")
  from colabs.run import execute

  corpus = [p["question"] + p["answer"] for p in problems(24)]
  make_checkpoint(tmp_path / "model", corpus, every_id_is_text=True)
  monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")  # as on a laptop
  return functools.partial(execute, folder=tmp_path, tiny=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_from_top_to_bottom(name, run):
  notebook = run(name)
  cells = code_cells(notebook)
  assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
  assert pictures(notebook) and not outputs(notebook, "error")
  assert "finished: metrics, completions and checkpoints are in" in texts(notebook, "stdout")
  said = texts(notebook, "stderr").splitlines()
  # Before the bar, lines say what takes long, such as "preparing the state: compiling init".
  # Warnings of Python, XLA and JAX have a path or a capital letter first.
  assert all(re.match(r"[a-z][\w.]*[ :](?!.*(?i:warning|error))", line) for line in said), said
  # It shows what the stored page shows.
  stored = [bool(cell.outputs) for cell in code_cells(read(name))]
  assert [bool(cell.outputs) for cell in cells] == stored


@pytest.mark.slow
def test_the_gsm8k_notebook_goes_on_after_its_runtime_has_gone(run, tmp_path, monkeypatch):
  original = nbformat.read

  def killed_after_step_6(path, as_version):
    notebook = original(path, as_version)
    for cell in code_cells(notebook):
      call = "def __call__(self, step):\n"
      kill = "    if step.step == 6:\n      os.kill(os.getpid(), 9)\n"
      cell.source = cell.source.replace(call, call + kill)
    return notebook

  with monkeypatch.context() as patched:
    patched.setattr(nbformat, "read", killed_after_step_6)
    with pytest.raises(Exception, match="Kernel died"):
      run("gsm8k_tpu")
  again = run("gsm8k_tpu")
  assert "resuming from step 4 of 12 in gsm8k" in texts(again, "stdout")
  steps = [row["step"] for row in grpo_jax.read_metrics(tmp_path / "gsm8k")]
  assert steps == list(range(13))


SETTINGS = {
  "steps": 10_000,
  "warm_start.steps": 0,
  "batch.prompts": 8,
  "batch.group_size": 2,
  "sampling.max_tokens": 4,
  "eval.every": 0,
  "checkpoint.every": 0,
  "log.completions_every": 0,
}


@pytest.mark.slow
def test_the_stop_button_saves_and_the_cell_goes_on(run, tmp_path):
  """Also: an error of a user's function shows the user's line, and bad input is one line."""
  from jupyter_client.manager import KernelManager

  kernel = KernelManager()
  kernel.start_kernel(cwd=str(tmp_path))
  client = kernel.client()
  client.start_channels()
  client.wait_for_ready(timeout=60)

  def messages(code, stop_at=None):
    """What a cell shows. The stop button is pressed when it shows `stop_at`.

    The kernel also repeats the cell's code, before it runs: the button would come too early.
    """
    request, shown = client.execute(code), []
    while True:
      message = client.get_iopub_msg(timeout=300)
      if message["parent_header"].get("msg_id") != request:
        continue
      shown.append((message["msg_type"], message["content"]))
      if shown[-1] == ("status", {"execution_state": "idle"}):
        return shown
      if stop_at and message["msg_type"] != "execute_input" and stop_at in str(message["content"]):
        kernel.interrupt_kernel()
        stop_at = None

  def errors(shown):
    return ["\n".join(content["traceback"]) for kind, content in shown if kind == "error"]

  try:
    load = f"import grpo_jax\nconfig = grpo_jax.load_config('arithmetic', {SETTINGS})"
    assert not errors(messages(load))
    stopped = messages("grpo_jax.train(config, 'run')", stop_at="grpo 1/")
    (error,) = errors(stopped)
    found = re.fullmatch(
      r"Stopped: at step (\d+) of 10000, which is saved: the same call goes on from there", error
    )
    assert found
    assert [kind for kind, _ in stopped].count("display_data") == 1  # the bar
    once_more = messages("grpo_jax.train(config, 'run', lambda step: 1 / 0)")
    assert f"resuming from step {found[1]} of 10000" in str(once_more)
    (error,) = errors(once_more)
    assert "grpo_jax.train(config, 'run', lambda step: 1 / 0)" in error
    assert "loop.py" not in error and f"step {int(found[1]) + 1} is saved" in error
    (error,) = errors(messages("config.replace({'stepz': 1})"))
    assert error == "ConfigError: config key stepz is unknown: did you mean steps?"
    # The kernel's own handler is back: the next press of the button interrupts a cell.
    (error,) = errors(messages("print('now')\nimport time\ntime.sleep(60)", stop_at="now"))
    assert "KeyboardInterrupt" in error
  finally:
    client.stop_channels()
    kernel.shutdown_kernel(now=True)
