"""experiments/bench.py runs, with tails and few rows in flight, and scripts start from a shell."""

import ast
import importlib.util
import json
import os
from pathlib import Path
import re
import subprocess
import sys

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_a_tiny_job_with_long_tails_prints_its_line(monkeypatch, capsys):
  monkeypatch.syspath_prepend(str(ROOT / "experiments"))
  import bench

  sizes = "--d=16 --layers=1 --heads=2 --ff=32 --prompts=8 --G=4 --plen=8 --clen=16 --steps=1"
  monkeypatch.setattr(sys, "argv", ["bench", *sizes.split(), "--lengths=geometric", "--rows=8"])
  bench.main()
  result = json.loads(capsys.readouterr().out.splitlines()[-1])
  # 32 rows, most of which end long before 16 tokens.
  assert 32 <= result["tokens"] < 16 * 32 * 0.6 and result["sample_s"] > 0


FAST = ("bench",)


def named_scripts():
  """The scripts of experiments/ that a page names. Most are slow tests: each takes two seconds."""

  def named(pages):
    text = "".join(page.read_text() for page in pages)
    return set(re.findall(r"experiments/(\w+)\.py", text))

  scripts = named([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")])
  scripts |= named(ROOT.glob("experiments/*.md"))
  assert {*FAST} <= scripts
  slow = [pytest.param(script, marks=pytest.mark.slow) for script in sorted(scripts - {*FAST})]
  return [*FAST, *slow]


@pytest.mark.parametrize("script", named_scripts())
def test_a_script_starts_where_only_the_package_is_installed(script, tmp_path):
  """From the shell the root of the checkout is not on the path, as it is in pytest.

  It says how it is used, or which package it needs that is not installed.
  """
  variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
  command = [sys.executable, str(ROOT / f"experiments/{script}.py"), "--help"]
  done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=variables)
  first = ast.get_docstring(ast.parse(Path(command[1]).read_text())).splitlines()[0]
  missing = re.fullmatch(rf"{script}\.py needs ([\w.]+): .*install.*\n", done.stderr)
  if missing:
    assert importlib.util.find_spec(missing[1].split(".")[0]) is None
  else:
    output = (done.stdout + done.stderr).strip()
    assert output.startswith((f"usage: {script}.py", first)), output


def test_a_script_says_which_package_it_needs(tmp_path):
  (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError(name='matplotlib')")
  variables = os.environ | {"PYTHONPATH": str(tmp_path)}
  for script in ("plot_curves.py", "plot_training.py"):
    command = [sys.executable, str(ROOT / "experiments" / script)]
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    assert done.returncode == 1
    assert done.stderr == f"{script} needs matplotlib: pip install -e '.[plot]'\n"
