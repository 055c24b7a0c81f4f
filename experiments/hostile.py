"""Runs the programs on hostile inputs, and checks that each ends as its user would want.

python experiments/hostile.py [--only=WORD,WORD] [--jobs=2] [--keep=FOLDER] [--list]

The cases are rows in `hostile_cases/`, a file for each topic. A row has a command, the exit code
and the words that its user should get. `hostile_cases/case.py` explains the fields of a row. To add
a case, add a row to the list of its topic. --only=model/,chat/ runs two topics.

Each command runs as a process of its own, in a folder of its own, without a network. Beside code
and words, these things are checked for every case:

* No output holds "Traceback (most recent call last)", and no line is longer than 2000 characters.
* stderr has at most 5 lines, not counting warnings and progress.
* Code 0 means that the work is done: every step of a training run has one row in metrics.jsonl and
  the last step has a checkpoint, and an exported folder holds its files. What an evaluation or a
  sample prints is among the words of its row.
* Code 75 means that the state is saved: the last row of metrics.jsonl has a checkpoint.
* No file is lost. What was in the folder before the command is there after it: unchanged, with
  something appended, or under another name. A run that has begun may write its config.json and its
  environment.json again. A row lists other exceptions in `may_change`.
* Nothing is silent for more than 10 seconds, from the start on. The time in which a thread of the
  process waited for a core is taken off each silence (schedstat of Linux), so that other programs
  on the machine do not count. Compiled programs are kept between the runs of this script. A case
  that compiled in its first run may have been silent for longer: run it a second time.

The programs under test are those of the tree that holds this script. The exit code is 1 if a case
fails. Each failing case says at once what is wrong, and again at the end with what it printed.

Exit codes of the programs: 0 done, 1 failed, 2 bad input, 75 stopped early with its state saved,
128 + N left at once on a second signal N.
"""

import argparse
from collections.abc import Iterator, Mapping
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import os
from pathlib import Path
import shutil
import subprocess
import sys
import tempfile
import time

from hostile_cases import ALL
from hostile_cases.case import Case
from hostile_cases.checks import Snapshot, problems_of
from hostile_cases.process import Ended, run_process

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden"

# A run whose programs compile within seconds.
TINY = """from grpo_jax.configs import default
def get_config(preset="grpo"):
  c = default.get_config(preset)
  c.steps = 3
  c.model.update(embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=32)
  c.batch.update(prompts=4, group_size=2)
  c.data.task, c.data.path = "gsm8k", "sums"
  c.data.max_prompt_tokens = 12
  c.sampling.max_tokens = 5
  c.eval.update(examples=8, batch=8)
  c.checkpoint.update(every=1, keep=9)
  c.log.update(completions_every=1, tensorboard=False)
  return c
"""
SUMS = "".join(
  json.dumps({"question": f"{i}+{i + 1}=", "answer": f"{2 * i + 1}#### {2 * i + 1}"}) + "\n"
  for i in range(1, 13)
)
VARIABLES = {
  "RUN": "--config=tiny.py --workdir=run",
  "GSM": "--config=tiny.py --workdir=run --config.data.path=data",
  "MODEL": "--config=tiny.py --workdir=run --config.model.path=model",
  "CHAT": "--config=tiny.py --workdir=run --config.model.path=model --config.data.chat=True",
  "LORA": "--config=tiny.py --workdir=run --config.model.path=model --config.lora.rank=2",
  "BESIDE": "--config=tiny.py --config.mesh.sampler=1"
  " --config.rollout.max_staleness=1 --config.rollout.weights=newest"
  " --config.algo.old_logprobs=sampler --config.algo.kl_coef=0.0",
  # In the process of the run, one call gets all completions of a step.
  "REWARD": "--config=tiny.py --workdir=run --config.reward.functions=('reward.py:f',)"
  " --config.reward.workers=0",
}
# The commands that make each fixture, in the order in which they can be made.
FIXTURES = {
  "run": "train $RUN",
  "warm": "train --config=tiny.py --workdir=warm --config.warm_start.steps=2"
  " --config.warm_start.batch=4 --config.algo.kl_coef=0.1 --config.steps=2"
  " --config.sampling.max_tokens=12",
  "beside": "JAX_NUM_CPU_DEVICES=2 train $BESIDE --workdir=beside",
  "model": "export --workdir=run --out=model",
  "lora": "train --config=tiny.py --workdir=lora --config.model.path=model --config.lora.rank=2"
  " --config.steps=2",
  "adapter": "export --workdir=lora --out=adapter --adapter",
  "scorer": f"cp -r {GOLDEN}/rewards/qwen2 scorer && chmod -R u+w scorer",
  "steps_scorer": f"cp -r {GOLDEN}/rewards/qwen2_steps steps_scorer && chmod -R u+w steps_scorer",
  "sentencepiece": f"cp -r {GOLDEN}/tokenizers/llama2 sentencepiece",
  "bpe": f"cp -r {GOLDEN}/tokenizers/qwen bpe",
  "data": "cp -r sums data",
}


def main() -> None:
  """Runs the cases that the flags choose, and prints a table."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--only", default="", help="run the cases whose names have this word")
  parser.add_argument("--jobs", type=int, default=2, help="how many cases run at a time")
  parser.add_argument("--keep", default="", help="keep compiled programs and fixtures here")
  parser.add_argument("--list", action="store_true", help="print the rows without running them")
  flags = parser.parse_args()
  cases = [case for case in ALL if any(word in case.name for word in flags.only.split(","))]
  if flags.list:
    for case in cases:
      print(f"{case.name:44} {case.code!s:8} {case.command!r:.150} {' | '.join(case.words)}")
    print(f"{len(cases)} cases")
    return
  kept = Path(flags.keep or Path(tempfile.gettempdir(), "grpo_jax_hostile")).absolute()
  started = time.monotonic()
  with tempfile.TemporaryDirectory(prefix="hostile_") as temporary:
    place = Place(Path(temporary), kept)
    fixtures = place.make_fixtures()
    print(f"{len(cases)} cases; fixtures and compiled programs are in {kept}", flush=True)
    failed: list[tuple[Case, Ended, list[str]]] = []
    with concurrent.futures.ThreadPoolExecutor(flags.jobs) as pool:
      for case, ended, problems in pool.map(lambda case: place.run(case, fixtures), cases):
        print(
          f"{'FAILED' if problems else 'ok':7}{case.name:46} code {ended.code!s:4}"
          f"{ended.seconds:6.1f} s, silent {ended.silent:4.1f} s",
          flush=True,
        )
        if problems:
          print(f"       {'; '.join(problems)}", flush=True)
          failed.append((case, ended, problems))
  for case, ended, problems in failed:
    print(f"\n=== {case.name}\n$ {case.command:.500}\nexpected: {case.code} {case.words}")
    print(*(f"problem: {problem}" for problem in problems), sep="\n")
    print("\n".join(line[:300] for line in ended.output[-4000:].splitlines()[-30:]))
  print(
    f"\n{len(cases) - len(failed)} of {len(cases)} cases ended as they should,"
    f" in {time.monotonic() - started:.0f} s with {flags.jobs} at a time"
  )
  sys.exit(1 if failed else 0)


@dataclasses.dataclass(frozen=True)
class Place:
  """Where cases run.

  Attributes:
    folder: Holds the folders of the cases.
    kept: Holds compiled programs and fixtures, also for later runs of this script.
  """

  folder: Path
  kept: Path

  def make_fixtures(self) -> Path:
    """The folder of the fixtures, which the programs of the tree make once."""
    (self.kept / "compiled").mkdir(parents=True, exist_ok=True)
    (self.kept / "compiled").chmod(0o777)
    bin_folder = self.folder / "bin"
    bin_folder.mkdir()
    self.folder.chmod(0o755)
    for name in ("train", "evaluate", "sample", "export", "report", "serve"):
      script = f'#!/bin/sh\nexec nice "{sys.executable}" -m grpo_jax.{name} "$@"\n'
      (bin_folder / name).write_text(script)
      (bin_folder / name).chmod(0o755)
    # Otherwise `export` is the command of bash.
    (self.folder / "bashrc").write_text("enable -n export\n")
    done = self.kept / f"fixtures-{_digest_of_tree()}"
    if done.exists():
      return done
    new = self.folder / "fixtures"
    new.mkdir()
    (new / "tiny.py").write_text(TINY)
    _write_sums(new / "sums")
    for name, command in FIXTURES.items():
      made = subprocess.run(
        ["bash", "-c", command], cwd=new, env=self._environment(new), capture_output=True, text=True
      )
      if made.returncode or not (new / name).is_dir():
        sys.exit(f"the fixture {name} failed:\n$ {command}\n{made.stdout}{made.stderr}")
    with contextlib.suppress(OSError):  # another run of this script was faster
      shutil.copytree(new, self.kept / f"new-{os.getpid()}", symlinks=True)
      (self.kept / f"new-{os.getpid()}").rename(done)
    return done

  def run(self, case: Case, fixtures: Path) -> tuple[Case, Ended, list[str]]:
    """Runs a case, and says what is wrong with how it ended."""
    folder = self.folder / hashlib.sha1(case.name.encode()).hexdigest()[:8]
    folder.mkdir()
    try:
      _prepare(folder, case, fixtures)
      before = Snapshot.of(folder)
      environment = self._environment(folder, case.env)
      ended = run_process(case, case.command, folder, environment)
      problems = problems_of(case, case.command, folder, ended, before)
      if case.then:
        again = dataclasses.replace(case, code=0, words=(), signals=(), env={}, as_user=False)
        second = run_process(again, case.then, folder, self._environment(folder))
        found = problems_of(again, case.then, folder, second, before)
        problems += [f"then: {problem}" for problem in found]
        ended = dataclasses.replace(ended, output=f"{ended.output}\n--- then\n{second.output}")
      return case, ended, problems
    except Exception as error:  # a step of the setup failed
      return case, Ended(), [f"the case itself: {error!r}"]
    finally:
      shutil.rmtree(folder, ignore_errors=True)

  def _environment(
    self, folder: Path, changes: Mapping[str, str | None] | None = None
  ) -> dict[str, str]:
    wanted = ("LANG", "LC_ALL", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
    values: dict[str, str | None] = {key: os.environ.get(key) for key in wanted}
    values |= VARIABLES
    values |= {
      "PATH": f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
      "BASH_ENV": str(self.folder / "bashrc"),
      "PYTHONPATH": str(ROOT),
      "PYTHONDONTWRITEBYTECODE": "1",
      "HOME": str(folder / "home"),
      "TMPDIR": str(folder / "tmp"),
      "HF_HUB_OFFLINE": "1",
      "JAX_PLATFORMS": "cpu",
      "JAX_NUM_CPU_DEVICES": "1",
      "JAX_COMPILATION_CACHE_DIR": str(self.kept / "compiled"),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    values |= changes or {}
    return {key: value for key, value in values.items() if value is not None}


def _prepare(folder: Path, case: Case, fixtures: Path) -> None:
  (folder / "home").mkdir()
  (folder / "tmp").mkdir()
  (folder / "tiny.py").write_text(TINY)
  _write_sums(folder / "sums")
  for name in case.needs.split():
    shutil.copytree(fixtures / name, folder / name, symlinks=True)
    for config in folder.glob(f"{name}/config.json"):  # it may name another fixture
      config.write_text(_moved(config.read_text(), fixtures, folder))
  for name, content in case.files.items():
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
  for step in case.setup:
    step(folder)


def _write_sums(folder: Path) -> None:
  folder.mkdir()
  for split in ("train", "test"):
    (folder / f"{split}.jsonl").write_text(SUMS)


def _moved(config: str, fixtures: Path, folder: Path) -> str:
  """A config whose paths are in the folder of the case, wherever its fixture was made."""
  values = json.loads(config)
  for section, key in (("model", "path"), ("lora", "path"), ("data", "path")):
    path = values.get(section, {}).get(key) if isinstance(values.get(section), dict) else None
    if path:
      values[section][key] = str(folder / Path(path).name)
  return json.dumps(values, indent=2) + "\n"


def _digest_of_tree() -> str:
  digest = hashlib.sha1((TINY + SUMS + repr(FIXTURES)).encode())
  for path in _sources():
    digest.update(path.read_bytes())
  return digest.hexdigest()[:12]


def _sources() -> Iterator[Path]:
  yield from sorted((ROOT / "grpo_jax").rglob("*.py"))
  yield from sorted((ROOT / "configs").rglob("*.py"))


if __name__ == "__main__":
  main()
