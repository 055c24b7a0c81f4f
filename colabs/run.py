"""Runs the notebooks of this folder from top to bottom and stores their outputs in them.

python -m colabs.run [--tiny] [NAME ...]

With --tiny, the same cells run with tiny settings, within a minute. A notebook whose stored outputs
come from a tiny run says so in its first cell. Needs pip install -e '.[notebooks]'.
"""

import argparse
import os
from pathlib import Path
import resource
import tempfile

import nbclient
import nbformat
from nbformat import NotebookNode

from tests.small_qwen import make_checkpoint, problems

FOLDER = Path(__file__).parent
TINY = "GRPO_JAX_TINY"  # the environment variable that the notebooks read
STORED_TINY = ("gsm8k_tpu",)  # nobody here has a TPU


def execute(name: str, folder: Path, tiny: bool = False) -> NotebookNode:
  """Runs a notebook and returns it with its outputs.

  Args:
    name: Its file name without .ipynb.
    folder: Where it runs: what it writes under relative names goes there. With `tiny`, it holds the
      model of the GSM8K notebook as the folder `model`.
    tiny: Whether to run it with tiny settings.

  Raises:
    nbclient.exceptions.CellExecutionError: A cell raised something.
  """
  notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
  client = nbclient.NotebookClient(
    notebook,
    timeout=None,
    kernel_name="python3",
    record_timing=False,
    resources={"metadata": {"path": str(folder)}},
  )
  environment = {key: value for key, value in os.environ.items() if key != TINY}
  if tiny:
    environment[TINY] = "."
  client.execute(env=environment)
  return notebook


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
  """The cells that are run."""
  return [cell for cell in notebook.cells if cell.cell_type == "code"]


def store(name: str, notebook: NotebookNode) -> None:
  """Writes a notebook with its outputs, but without the lines that say what takes long."""
  for cell in code_cells(notebook):
    cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
  notebook.metadata.language_info = {"name": "python"}
  (FOLDER / f"{name}.ipynb").write_text(nbformat.writes(notebook, indent=1) + "\n")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--tiny", action="store_true", help="run with tiny settings")
  names = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
  parser.add_argument("names", nargs="*", help=f"such as {names[0]} (default: all)")
  arguments = parser.parse_args()
  for name in arguments.names or names:
    tiny = arguments.tiny or name in STORED_TINY
    before = _cpu_seconds()
    with tempfile.TemporaryDirectory() as folder:
      if tiny:
        texts = [problem["question"] + problem["answer"] for problem in problems(24)]
        make_checkpoint(Path(folder) / "model", texts, every_id_is_text=True)
      store(name, execute(name, Path(folder), tiny))
    print(f"{name}: {_cpu_seconds() - before:.0f} seconds of a CPU core", flush=True)


def _cpu_seconds() -> float:
  used = resource.getrusage(resource.RUSAGE_CHILDREN)
  return used.ru_utime + used.ru_stime


if __name__ == "__main__":
  main()
