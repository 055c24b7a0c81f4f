"""Launches runs as work units of XManager, with experiments/xm_launch.py."""

from collections.abc import Sequence
import os
from pathlib import Path
import shlex
import shutil
import sys
import tempfile

from grpo_jax.around.launchers.options import Options
from grpo_jax.around.launchers.units import Unit
from grpo_jax.console.exit_codes import DONE
from grpo_jax.settings import ConfigError

_SCRIPT = Path(__file__).resolve().parents[3] / "experiments" / "xm_launch.py"


def launch(units: Sequence[Unit], options: Options) -> int:
  """Replaces this program by `xmanager launch`, or prints the commands of the runs.

  Args:
    units: The runs to train.
    options: Uses at_once, xm and dry_run.

  Returns:
    0 after a dry run. Otherwise it does not return.

  Raises:
    ConfigError: The program xmanager or the script is missing.
  """
  lines = [shlex.join(unit.command()) for unit in units]
  if options.dry_run:
    print("\n".join(lines))
    return DONE
  program = shutil.which("xmanager")
  if not program:
    raise ConfigError(
      "flag --on=xmanager: there is no xmanager on the PATH: pip install uv && uv tool install"
      " xmanager"
    )
  if not _SCRIPT.is_file():
    raise ConfigError(f"flag --on=xmanager: there is no {_SCRIPT}: use the source tree")
  runs = tempfile.TemporaryFile("w")  # without a name: xmanager inherits it by its descriptor
  runs.write("".join(f"{line}\n" for line in lines))
  runs.flush()  # `execv` drops what is still buffered
  os.set_inheritable(runs.fileno(), True)
  args = [f"--runs=/dev/fd/{runs.fileno()}", f"--at_once={options.at_once or 1}", *options.xm]
  sys.stdout.flush()
  os.execv(program, [program, "launch", str(_SCRIPT), "--", *args])
