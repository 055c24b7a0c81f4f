"""experiments/bench.py runs, with tails and few rows in flight."""

import json
from pathlib import Path
import sys

import pytest


@pytest.mark.slow
def test_a_tiny_job_with_long_tails_prints_its_line(monkeypatch, capsys):
  monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "experiments"))
  import bench

  sizes = "--d=16 --layers=1 --heads=2 --ff=32 --prompts=8 --G=4 --plen=8 --clen=16 --steps=1"
  monkeypatch.setattr(sys, "argv", ["bench", *sizes.split(), "--lengths=geometric", "--rows=8"])
  bench.main()
  result = json.loads(capsys.readouterr().out.splitlines()[-1])
  # 32 rows, most of which end long before 16 tokens.
  assert 32 <= result["tokens"] < 16 * 32 * 0.6 and result["sample_s"] > 0
