"""What a user can tell a launcher: each option with its default, meaning and launchers, once."""

import dataclasses
from typing import Any

ALL = ("local", "slurm", "ray", "xmanager")


def _option(default: Any, meaning: str, *launchers: str) -> Any:
  """A field that is a flag of `grpo_jax.launch`, of the type of its default.

  Args:
    default: The value where the user gives none.
    meaning: The help of the flag.
    *launchers: The launchers that read the option. The others refuse the flag.
  """
  return dataclasses.field(
    default=default, metadata={"meaning": meaning, "launchers": launchers or ALL}
  )


@dataclasses.dataclass(frozen=True)
class Options:
  """How runs are started. No option changes what a run computes."""

  hosts: int = _option(1, "hosts of one run; with --on=local, processes of one run on this CPU")
  at_once: int = _option(0, "runs at once; 0 = one with --on=local, else as many as there is room")
  dry_run: bool = _option(False, "print what would be started, and start nothing")
