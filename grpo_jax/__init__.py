"""Group Relative Policy Optimization for language models, in JAX."""

import signal
import sys

if sys.argv[0] == "-m" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
  # `python -m grpo_jax.train` imports for seconds. Until `cli.run` handles it, Ctrl-C ends the
  # process at once and prints no traceback of an import.
  signal.signal(signal.SIGINT, signal.SIG_DFL)
