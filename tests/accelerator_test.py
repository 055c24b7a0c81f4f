"""experiments/accelerator.py: its parts fail, hang and are cut off here, and all of them run.

The run of all parts has the sizes of `--tiny`, on the CPU.
"""

import contextlib
import importlib.util
import json
import os
from pathlib import Path
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "experiments/accelerator.py"
PATIENCE = 60  # seconds, on a machine with other things to do
# The start of a part's script: it reads where its results go, as accelerator_part.py does.
BEGIN = """
import json, os, subprocess, sys, time
def save(**results):
  (file,) = [x.partition("=")[2] for x in sys.argv if x.startswith("--results=")]
  with open(file + ".new", "w") as opened:
    json.dump(results, opened)
  os.replace(file + ".new", file)
"""


@pytest.fixture
def accelerator(monkeypatch):
  monkeypatch.syspath_prepend(str(ROOT / "experiments"))
  import accelerator

  return accelerator


@pytest.fixture
def pieces(accelerator):
  import accelerator_parts

  return accelerator_parts


def script(text):
  return (sys.executable, "-c", BEGIN + text)


def turn_script(text):
  """A script that measures with the class of accelerator_parts.py. Its file is `results`."""
  begin = f"""
import pathlib, sys
sys.path.insert(0, {str(ROOT / "experiments")!r})
results = pathlib.Path(next(x.partition("=")[2] for x in sys.argv if x.startswith("--results=")))
"""
  return (sys.executable, "-c", begin + text)


def measured(accelerator, tmp_path, *parts, seconds=PATIENCE):
  """The parts of the file after a run of these."""
  file = tmp_path / "out.json"
  accelerator.measure(parts, file, seconds, {"parts": {}}, ["--tiny"])
  report = json.loads(file.read_text())
  assert report["seconds"] < PATIENCE
  return report["parts"]


def test_a_part_that_fails_is_recorded_and_the_next_one_runs(accelerator, tmp_path):
  found = measured(
    accelerator,
    tmp_path,
    accelerator.Part("fails", 30, 0, script("save(first=1); print('why'); sys.exit(3)")),
    accelerator.Part("says_why", 30, 0, script("save(first=1, error='one line'); sys.exit(1)")),
    accelerator.Part("dies", 30, 0, script("os.kill(os.getpid(), 11)")),
    accelerator.Part("works", 30, 0, script("save(second=2)")),
  )
  assert found["fails"]["error"] == "the process ended with code 3"
  assert found["fails"]["first"] == 1 and found["fails"]["log"] == ["why"]
  assert found["says_why"]["error"] == "one line" and found["says_why"]["first"] == 1
  assert found["dies"]["error"] == "the process ended with code -11"
  assert found["works"].keys() == {"second", "seconds"} and found["works"]["second"] == 2


@pytest.mark.slow
def test_a_part_that_hangs_is_stopped_with_all_that_it_started(accelerator, tmp_path):
  hang = f"""
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep({PATIENCE})"])
save(child=child.pid)
time.sleep({PATIENCE})
"""
  found = measured(
    accelerator,
    tmp_path,
    accelerator.Part("hangs", 3, 0, script(hang)),
    accelerator.Part("works", 30, 0, script("save(second=2)")),
  )
  assert found["hangs"]["error"] == "it was stopped after 3 s"
  assert 3 <= found["hangs"]["seconds"] < 20
  assert is_gone(found["hangs"]["child"])
  assert found["works"]["second"] == 2


def is_gone(pid):
  """Whether a process ends soon. One that nobody waits for may stay as a zombie."""
  status = Path(f"/proc/{pid}/stat")
  for _ in range(100):
    with contextlib.suppress(FileNotFoundError):
      if status.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.05)
        continue
    return True
  return False


def test_a_part_that_does_not_fit_the_time_is_skipped(accelerator, tmp_path):
  found = measured(
    accelerator,
    tmp_path,
    accelerator.Part("long", 100, 50, script("save(second=2)")),
    accelerator.Part("short", 100, 1, script("save(second=2)")),
    seconds=accelerator.RESERVE + 20,
  )
  assert found["long"] == {"skipped": "20 s are left, and it needs 50 s"}
  assert found["short"]["second"] == 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_cut_off_leaves_what_it_measured(number, tmp_path):
  file = tmp_path / "out.json"
  part = f"save(first=1, pid=os.getpid()); time.sleep({PATIENCE})"
  command = f"""
import pathlib, signal, sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import accelerator
signal.signal(signal.SIGTERM, accelerator.stop)
part = accelerator.Part("long", {PATIENCE}, 0, {script(part)!r})
accelerator.measure([part], pathlib.Path({str(file)!r}), 99, {{"parts": {{}}}}, ["--tiny"])
"""
  process = subprocess.Popen([sys.executable, "-c", command])
  deadline = time.monotonic() + PATIENCE
  while not file.exists() or "first" not in json.loads(file.read_text())["parts"]["long"]:
    assert time.monotonic() < deadline and process.poll() is None
    time.sleep(0.05)
  process.send_signal(number)
  assert process.wait(PATIENCE) == (-9 if number == signal.SIGKILL else 128 + number)
  found = json.loads(file.read_text())["parts"]["long"]
  assert found["first"] == 1
  if number == signal.SIGTERM:
    assert is_gone(found["pid"])
  else:
    os.kill(found["pid"], signal.SIGKILL)


TURN = """
import time
import accelerator_parts
part = accelerator_parts.Part(results, True, {})
part.save(compiled=time.monotonic())
part.take_turn()
part.save(began=time.monotonic())
time.sleep(0.3)
part.save(ended=time.monotonic())
"""


def test_parts_compile_beside_each_other_and_measure_one_after_the_other(accelerator, tmp_path):
  """None measures before all have compiled or ended, and no two measure at once."""
  slow = "time.sleep(0.5)\n" + TURN
  parts = [
    accelerator.Part("quick", 30, 0, turn_script(TURN)),
    accelerator.Part("slow", 30, 0, turn_script("import time\n" + slow)),
    accelerator.Part("fails", 30, 0, turn_script("sys.exit(3)")),
  ]
  report = accelerator.measure_together(parts, tmp_path / "o.json", 60, {"parts": {}}, ["--tiny"])
  found = report["parts"]
  assert found["fails"]["error"] == "the process ended with code 3"
  first, second = sorted((found["quick"], found["slow"]), key=lambda part: part["began"])
  assert first["began"] >= max(found["quick"]["compiled"], found["slow"]["compiled"])
  assert second["began"] >= first["ended"]


def test_names_of_parts(accelerator):
  assert [part.name for part in accelerator.chosen("gap,device")] == ["device", "gap"]
  assert accelerator.chosen("") == list(accelerator.PARTS)
  with pytest.raises(SystemExit, match="there is no part nonsense"):
    accelerator.chosen("nonsense")


def test_differences_of_rows(pieces):
  theirs = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 1.0}]
  assert pieces.differences_of_rows(theirs, theirs)["equal"]
  found = pieces.differences_of_rows([theirs[0], {"step": 2, "loss": 1.5}], theirs)
  assert found == {
    "number": 2,
    "equal": False,
    "that_differ": 1,
    "largest_difference": 0.25,  # 0.5 / (1 + 1)
    "there": {"step": 2, "name": "loss"},
  }
  assert not pieces.differences_of_rows(theirs[:1], theirs)["equal"]


def test_differences_of_arrays(pieces):
  theirs = {"a": np.float32([1, 2]), "b": np.float32([3])}
  assert pieces.differences_of_arrays(theirs, theirs)["equal"]
  found = pieces.differences_of_arrays(theirs | {"a": np.float32([1, 2.5])}, theirs)
  assert (found["equal"], found["largest_difference"], found["there"]) == (False, 0.5, "a")
  missing = pieces.differences_of_arrays({"a": theirs["a"]}, theirs)
  assert not missing["equal"] and missing["differing_bits"] == 32


def test_the_summary_of_a_run(pieces, tmp_path):
  """A line that is being written is no row. The steps that compile are not in the medians."""
  rows = [{"step": step, "time/step": 9.0 if step < 3 else 1.0} for step in range(1, 6)]
  rows[3] |= {"eval/accuracy": 0.5, pieces.GAP: 2e-6}
  file = tmp_path / "metrics.jsonl"
  assert pieces.summary_of_run(pieces.read_rows(file)) == {
    "step": 0,
    "accuracy": {},
    "logprob_gap_max": None,
  }
  file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 6')
  assert pieces.summary_of_run(pieces.read_rows(file)) == {
    "step": 5,
    "time/step": 1.0,
    "accuracy": {4: 0.5},
    "logprob_gap_max": 2e-6,
  }


def test_nan_is_the_largest_difference(pieces):
  found = pieces.summary({"a": 1.0, "b": float("nan"), "c": 0.0})
  assert found["there"] == "b" and np.isnan(found["largest"]) and found["above_1e-5"] == 2


def test_an_update_that_needs_too_much_memory_is_tried_with_less(pieces, monkeypatch, tmp_path):
  import accelerator_model
  import jax

  def one_update(part, run):
    if run.programs.micro_batch > 2:
      raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nand more")
    return {"seconds": 1.0}

  monkeypatch.setattr(accelerator_model, "one_update", one_update)
  part = pieces.Part(tmp_path / "results.json", True, {})
  accelerator_model.update(part)
  error = "JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory ... and more"
  assert json.loads((tmp_path / "results.json").read_text())["attempts"] == [
    {"micro_batch": 8, "is_choice": True, "error": error},
    {"micro_batch": 4, "is_choice": False, "error": error},
    {"micro_batch": 2, "is_choice": False, "seconds": 1.0},
  ]


def run(tmp_path, *options):
  """The report of the command in the sizes of a test, and its exit code."""
  file = tmp_path / "out.json"
  command = [sys.executable, str(SCRIPT), f"--out={file}", "--tiny", *options]
  done = subprocess.run(command, cwd=tmp_path, timeout=1200)
  return json.loads(file.read_text()), done.returncode


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "chunked"])
def test_attention_is_measured(name, pieces):
  """A window and a cap reach the implementation, and the reference is `dense` in float32."""
  import attention

  bench = attention.Bench(8, 2, 8, 2, jax.devices()[0], window=5, cap=2.0)
  found = bench.measure(name, here=True)
  assert found["compile_s"] > 0 and found["seconds"] > 0
  assert found["errors"].keys() == set("oqkv") and max(found["errors"].values()) < 0.05


@pytest.mark.slow
def test_the_device(tmp_path):
  report, code = run(tmp_path, "--only=device")
  found = report["parts"]["device"]
  assert code == 0 and report["parts"].keys() == {"device"}
  assert (found["platform"], found["number"], found["peak"]) == ("cpu", 1, None)
  assert found["versions"]["jax"] and found["memory"] > 2**30
  assert found["start"].keys() == {"import_s", "init_s"}
  assert found["reached"].keys() == {"bfloat16", "float32", "float32, JAX's default", "copy"}
  assert all(1e7 < value < 1e14 for value in found["reached"].values())


@pytest.mark.slow
def test_all_parts(tmp_path):
  report, code = run(tmp_path, "--seconds=1100")
  parts = report["parts"]
  assert code == 0, {name: found.get("error") for name, found in parts.items()}
  names = [
    "device",
    "quick_start",
    "resume",
    "golden",
    "gap",
    "decode",
    "update",
    "attention",
    "trl",
  ]
  assert list(parts) == names
  assert report["seconds"] < 1100 and all("seconds" in found for found in parts.values())

  quick = parts["quick_start"]
  assert quick["code"] == 0 and quick["step"] == 16 and 0 < quick["first_row_s"] <= quick["run_s"]
  assert quick["accuracy"] and quick["logprob_gap_max"] < 1e-4

  resume = parts["resume"]
  assert resume["equal"] and resume["rows"]["equal"] and resume["arrays"]["equal"]
  assert resume["rows"]["number"] == resume["steps"] == 16 and resume["arrays"]["number"] > 20
  assert resume["saved_at"] <= resume["killed_at"] < resume["steps"]

  golden = parts["golden"]
  assert golden["float32"]["cases"] == golden["of"] >= 39
  assert golden["float32"]["largest"] < 1e-5 and golden["float32"]["above_1e-5"] == 0
  assert 1e-5 < golden["bfloat16"]["median"] < 1e-2

  gap = parts["gap"]["dtypes"]
  assert gap["float32"]["tokens"] > 500
  assert gap["float32"]["max"] < 1e-4 and gap["bfloat16"]["max"] < 0.1
  assert -np.log(512) - 1 < gap["float32"]["mean_logprob"] < -4
  check_model_parts(parts)


def check_model_parts(parts):
  """The parts that measure a model's programs."""
  decode = parts["decode"]
  assert decode["rows"].keys() == {"16", "32"}
  for rows, found in decode["rows"].items():
    assert 0 < found["tokens"] <= int(rows) * 16 and found["tokens_per_s"] > 100
    assert 0 < found["by_shape"]["share_of_reached"] < 1

  update = parts["update"]
  (attempt,) = update["attempts"]
  assert attempt["is_choice"] and attempt["tokens"] == 8 * 8 * 16
  assert 0 < attempt["share_of_reached"] < 1
  memory = attempt["memory"]
  assert memory["estimate"] == memory["estimate_held"] + memory["estimate_activations"]
  assert memory["peak"] is None and memory["compiler"] > memory["compiler_temporary"] > 0
  for name in ("gap", "decode", "update", "attention"):
    assert parts[name]["compile_s"] and all(x > 0 for x in parts[name]["compile_s"].values())

  attention = parts["attention"]["names"]
  assert {name for name in attention if "skipped" in attention[name]} == {"splash", "cudnn"}
  assert max(attention["chunked"]["errors"].values()) < 0.05

  trl = parts["trl"]
  if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
    assert trl["grpo_jax"]["tokens"] == trl["transformers"]["tokens"] == 32
    assert "skipped" in trl["trl"] or trl["trl"]["step_s"] > 0
  else:
    assert trl["skipped"].startswith("not installed: ")
