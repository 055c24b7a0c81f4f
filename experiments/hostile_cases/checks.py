"""What must hold for every case: words, code, few lines, work done, and nothing lost."""

from collections.abc import Iterator
import dataclasses
import fnmatch
import hashlib
import json
from pathlib import Path
import re
import stat

from hostile_cases.case import Case
from hostile_cases.process import Ended

MAX_SILENCE = 10
MAX_LINE = 2000


@dataclasses.dataclass(frozen=True)
class Snapshot:
  """The files of a folder: length and digest, by path."""

  files: dict[str, tuple[int, str]]

  @classmethod
  def of(cls, folder: Path) -> "Snapshot":
    """Reads regular files only, and follows no links."""
    files = {}
    for path in folder.rglob("*"):
      name = str(path.relative_to(folder))
      if name.split("/")[0] not in ("home", "tmp") and stat.S_ISREG(path.lstat().st_mode):
        content = path.read_bytes()
        files[name] = (len(content), _digest(content))
    return cls(files)


def problems_of(
  case: Case, command: str, folder: Path, ended: Ended, before: Snapshot
) -> list[str]:
  """What is wrong with how a command ended, in words. Empty if all is well."""
  return [
    *_wrong_ending(case, ended),
    *_wrong_output(case, ended),
    *_undone(command, folder, ended.code),
    *_lost(case, folder, ended.code, before),
    *([] if case.saved is None else _unsaved(folder, case.saved)),
  ]


def _wrong_ending(case: Case, ended: Ended) -> Iterator[str]:
  codes = case.code if isinstance(case.code, tuple) else (case.code,)
  if ended.code is None:
    yield f"it had not ended after {case.limit} s"
  elif ended.code not in codes:
    yield f"code {ended.code} instead of {case.code}"
  if ended.silent > MAX_SILENCE:
    yield f"silent for {ended.silent:.1f} s"


def _wrong_output(case: Case, ended: Ended) -> Iterator[str]:
  flat = " ".join(ended.output.split())
  for word in case.words:
    if word not in flat:
      yield f"the output lacks {word!r}"
  for word in case.absent:
    if word in ended.output:
      yield f"the output has {word!r}"
  if "Traceback (most recent call last)" in ended.output:
    yield "a traceback"
  lines = [line for line in ended.stderr.splitlines() if line.strip()]
  counted = [line for line in lines if not re.match(r"loading|warning|still ", line)]
  if len(counted) > case.lines:
    yield f"{len(counted)} lines on stderr"
  if ended.code == 2 and not lines and "2>" not in case.command.replace(" ", "") and not case.tty:
    yield "code 2 without a word on stderr"
  longest = max(map(len, ended.output.splitlines()), default=0)
  if longest > MAX_LINE:
    yield f"a line of {longest} characters"


def _undone(command: str, folder: Path, code: int | None) -> Iterator[str]:
  """Work that code 0 or 75 promises and that is not there."""
  program = re.search(r"\b(train|evaluate|sample|export)\b", command)
  if program is None or code not in (0, 75) or "--help" in command:
    return
  if program[1] == "export" and code == 0:
    out = _flag(command, "out")
    wanted = "adapter_model.safetensors" if "--adapter" in command else "model.safetensors"
    for name in (wanted, "tokenizer.json"):
      path = _at(folder, out) / name
      if not path.is_file() and not (_at(folder, out) / "tokenizer.model").is_file():
        yield f"code 0, but {path} is missing"
  if program[1] == "train":
    workdir = _flag(command.replace("$", " --workdir=run "), "workdir") or "run"
    yield from _undone_training(_at(folder, workdir), code)


def _undone_training(workdir: Path, code: int) -> Iterator[str]:
  try:
    config = json.loads((workdir / "config.json").read_text())
  except (OSError, ValueError) as error:
    yield f"code {code}, but config.json cannot be read: {error}"
    return
  total = config["steps"] + config["warm_start"]["steps"]
  saved = _checkpoints(workdir)
  rows = []
  if (workdir / "metrics.jsonl").exists():
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line)["step"] for line in lines]
  if len(set(rows)) < len(rows) or rows != sorted(rows):
    yield f"metrics.jsonl has the steps {rows}"
  if code == 75 and rows and max(rows) not in (0, *saved):  # step 0 is the start itself
    yield f"code 75, but the checkpoints are {saved} and the last row is {max(rows)}"
  if code == 0 and total:
    if total not in saved:
      yield f"code 0, but the checkpoints of a run of {total} steps are {saved}"
    if not rows or rows[-1] != total:
      yield f"code 0, but the last row of a run of {total} steps is {rows[-1:]}"


def _unsaved(folder: Path, step: int) -> Iterator[str]:
  saved = _checkpoints(folder / "run")
  if step not in saved:
    yield f"step {step} is not saved: there are {saved}"


def _lost(case: Case, folder: Path, code: int | None, before: Snapshot) -> Iterator[str]:
  after = Snapshot.of(folder)
  contents = {digest for _, digest in after.files.values()}
  for name, (length, digest) in before.files.items():
    if digest in contents or not length:
      continue
    patterns = [
      *case.may_change,
      *(["*/config.json", "*/environment.json"] if code in (0, 1, 75) else []),
    ]
    if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
      continue
    path = folder / name
    if path.is_file() and _digest(path.read_bytes()[:length]) == digest:
      continue  # something was appended
    yield f"{name} {'has other content' if path.exists() else 'is gone'}"


def _checkpoints(workdir: Path) -> list[int]:
  folder = workdir / "checkpoints"
  names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
  return sorted(int(name) for name in names if re.fullmatch(r"[0-9]+", name))


def _flag(command: str, name: str) -> str:
  """The last value of a flag in a command."""
  found = re.findall(rf"--{name}[= ]('[^']*'|\"[^\"]*\"|[^\s;|&)]+)", command)
  return found[-1].strip("'\"") if found else ""


def _at(folder: Path, path: str) -> Path:
  return folder / path.replace("~", "home")


def _digest(content: bytes) -> str:
  return hashlib.sha1(content).hexdigest()
