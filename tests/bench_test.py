"""experiments/bench.py runs, with tails and few rows in flight, and scripts start from a shell."""

import json
import os
from pathlib import Path
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


@pytest.mark.parametrize("script", ["bench", "memory", "compiled_bytes", "accelerator_variants"])
def test_a_script_starts_where_only_the_package_is_installed(script, tmp_path):
  """From the shell the root of the checkout is not on the path, as it is in pytest."""
  variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
  command = [sys.executable, str(ROOT / f"experiments/{script}.py"), "--help"]
  done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=variables)
  # memory.py has no flags, and prints what it is for.
  assert done.stdout.startswith("usage: ") or done.stderr.startswith("Measures"), done.stderr
