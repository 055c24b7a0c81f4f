"""How a program ends: its exit code, and the line that says why."""

import signal

from grpo_jax.settings import ConfigError, RunFailed

FAILED = 1
BAD_INPUT = 2
STOPPED = 75  # EX_TEMPFAIL of sysexits.h: the same command goes on

_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory")


class Stopped(Exception):
  """A run was asked to stop before its last step. Its state is saved."""


def exit_of(error: BaseException) -> tuple[int, str] | None:
  """The exit code and the line for stderr that an error ends a program with.

  Args:
    error: What a program raised.

  Returns:
    The code and the line, which is empty if everything is said already. None for an error that is
    a defect of the program, whose traceback helps.
  """
  if isinstance(error, ConfigError):
    return BAD_INPUT, f"error: {_one_line(error)}"
  if isinstance(error, RunFailed):
    return FAILED, f"error: {_one_line(error)}"
  if isinstance(error, Stopped):
    return STOPPED, ""
  if isinstance(error, KeyboardInterrupt):
    return 128 + signal.SIGINT, "interrupted"
  if isinstance(error, BrokenPipeError):
    return FAILED, "error: stdout was closed before everything was printed"
  if is_out_of_memory(error):
    return FAILED, f"error: {memory_line(error)}"
  return None


def is_out_of_memory(error: BaseException) -> bool:
  """Whether the host or a device had not enough memory."""
  from_xla = type(error).__name__ == "JaxRuntimeError"
  return isinstance(error, MemoryError) or (
    from_xla and any(words in str(error) for words in _OUT_OF_MEMORY)
  )


def memory_line(error: BaseException) -> str:
  """What went wrong and which keys to lower."""
  details = f" ({str(error).splitlines()[0]:.120})" if str(error) else ""
  return (
    f"out of memory{details}: lower batch.micro_batch, learner.logprob_chunk, batch.prompts,"
    " batch.group_size, eval.batch, sampling.max_tokens or the size of the model, or set"
    " learner.remat=True"
  )


def _one_line(error: BaseException) -> str:
  return " ".join(str(error).splitlines())
