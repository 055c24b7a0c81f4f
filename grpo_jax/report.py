"""Writes one HTML page that shows runs: settings, curves and completions.

python -m grpo_jax.report DIR [DIR ...] --out=page.html

A DIR is the folder of a run, or a folder of such folders, such as that of a sweep. The page is one
file that needs neither network nor server.
"""

from collections.abc import Sequence
import functools
from pathlib import Path
import sys
import tempfile

from absl import flags

from grpo_jax import cli
from grpo_jax.around.reporting.page import page
from grpo_jax.around.reporting.runs import ShownRun, read_run, with_unique_names
from grpo_jax.progress import doing
from grpo_jax.settings import ConfigError
from grpo_jax.storage.json_files import replace_file


def main(argv: Sequence[str], folders: Sequence[str]) -> None:
  """Reads the runs in `folders`, and writes the page to --out."""
  del argv
  if not folders:
    raise ConfigError("name the folder of at least one run: grpo_jax.report DIR --out=page.html")
  if not flags.FLAGS.out:
    raise ConfigError("flag --out is missing: the page to write, such as page.html")
  out = cli.folder_of_flag("out", flags.FLAGS.out)
  _check_writable(out)
  paths = [path for folder in folders for path in _run_folders(folder)]
  runs: list[ShownRun] = []
  with doing("reading", len(paths), "runs") as work:
    for path in paths:
      runs.append(read_run(str(path)))
      work.advance()
    text = page(with_unique_names(runs))
  replace_file(out, text)
  print(f"{out}: {len(runs)} {'run' if len(runs) == 1 else 'runs'}, {len(text) / 1e6:.1f} MB")


def _check_writable(out: Path) -> None:
  """Raises ConfigError if `out` cannot be written, before many runs are read."""
  if out.is_dir():
    raise ConfigError(f"flag --out={out} is a folder: name a file in it, such as {out}/page.html")
  if out.exists() and not out.is_file():
    raise ConfigError(f"flag --out={out} is not a regular file: name another one")
  try:
    with tempfile.TemporaryFile(dir=out.parent):
      pass
  except OSError as error:
    raise ConfigError(
      f"flag --out={out}: no file can be written in {out.parent} ({error.strerror}): make that"
      " folder, or name another one"
    ) from None


def _run_folders(folder: str) -> list[Path]:
  """The folder itself if it holds a run, or else the folders of the runs in it."""
  path = Path(folder).expanduser()
  if (path / "config.json").is_file():
    return [path]
  inside = sorted(found.parent for found in path.glob("*/config.json"))
  if not inside:
    raise ConfigError(f"{folder} is not the folder of a run: it has no config.json")
  return inside


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
  """Splits a command line into program and flags, and the folders of runs."""
  others, folders = list(argv[:1]), []
  rest = iter(argv[1:])
  for argument in rest:
    if not argument.startswith("-"):
      folders.append(argument)
      continue
    others.append(argument)
    if argument.lstrip("-") == "out":  # the next argument is the value of the flag
      others += [value for value in [next(rest, None)] if value is not None]
  return others, folders


if __name__ == "__main__":
  flags.DEFINE_string("out", None, "the page to write, such as page.html")
  given, of_runs = split(sys.argv)
  cli.run(functools.partial(main, folders=of_runs), given)
