"""Sets up JAX before anything imports it: eight simulated devices, and quick compilation.

Compiled programs are kept for the session, in a folder that its processes share.
"""

import gc
import importlib.metadata
import importlib.util
import os
import runpy
import sys
import tempfile
import zlib

from absl import app
from absl import flags as absl_flags
import hypothesis
import pytest
import shape_letters

# The machine may be busy, and a test that fails must fail again.
hypothesis.settings.register_profile("steady", deadline=None, derandomize=True)
hypothesis.settings.load_profile("steady")
# Most of the suite's time is compilation. What is compiled need not be fast.
# To split a program into parts that compile in parallel costs more than it saves here.
flags = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
_jaxlib = tuple(int(number) for number in importlib.metadata.version("jaxlib").split(".")[:2])
_has_cuda = any(importlib.util.find_spec(f"jax_cuda{number}_plugin") for number in (12, 13))
if _jaxlib < (0, 12) and not _has_cuda:  # later ones, and XLA for GPUs, have no such flag
  flags.append("--xla_cpu_use_fusion_emitters=false")
# A worker inherits the folder of the process that started it.
if "PYTEST_XDIST_WORKER" in os.environ:
  _folder = os.environ["JAX_COMPILATION_CACHE_DIR"]
else:
  _cache = tempfile.TemporaryDirectory(prefix="grpo_jax_compiled_")  # removed when the session ends
  _folder = _cache.name
os.environ.update(
  JAX_PLATFORMS="cpu",
  JAX_NUM_CPU_DEVICES="8",
  XLA_FLAGS=" ".join([os.environ.get("XLA_FLAGS", ""), *flags]),
  JAX_COMPILATION_CACHE_DIR=_folder,
  JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
  JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
  HF_HUB_OFFLINE="1",
)
shape_letters.install()  # before anything imports grpo_jax
# JAX makes many objects that live on. Python's collector looks at them often and finds little. That
# took a tenth of the time.
gc.set_threshold(200_000, 50, 50)


def pytest_addoption(parser):
  parser.addoption("--part", default="", help="K/N: only part K, from 0, of N parts of the tests")


def pytest_collection_modifyitems(config, items):
  """Deselects the tests of other parts. A test's part depends on its name alone."""
  part = config.getoption("--part")
  if not part:
    return
  number, of, count = part.partition("/")
  if not (of and number.isdecimal() and count.isdecimal() and int(number) < int(count)):
    raise pytest.UsageError(f"--part={part}: write K/N with K from 0 to N - 1")
  is_kept = [zlib.crc32(item.nodeid.encode()) % int(count) == int(number) for item in items]
  others = [item for item, kept in zip(items, is_kept) if not kept]
  config.hook.pytest_deselected(items=others)
  items[:] = [item for item, kept in zip(items, is_kept) if kept]


def pytest_collection_finish(session):
  """Spares Python's collector what lives as long as the session: modules, and 4,800 tests.

  Each call of `grpo_jax.train` collects, which took a fifth of a second and now takes a hundredth.
  """
  del session
  gc.collect()
  gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
  """Spares Python's collector what a file leaves behind, such as JAX's caches of what it traced.

  It grows with each file, until a call of `grpo_jax.train` would take 1.5 seconds.
  """
  result = yield
  if nextitem is None or nextitem.path != item.path:
    gc.collect()
    gc.freeze()
  return result


@pytest.fixture(autouse=True)
def tables():
  """The tables of rewards, surrogates and tasks are afterwards as they were."""
  from grpo_jax.algo.surrogates import SURROGATES
  from grpo_jax.data.tasks.tasks import TASKS
  from grpo_jax.rewards import REWARDS

  before = [(table, dict(table)) for table in (REWARDS, SURROGATES, TASKS)]
  yield
  for table, entries in before:
    table.clear()
    table.update(entries)


@pytest.fixture
def start(monkeypatch, capsys):
  """start(NAME, *FLAGS) -> (code, stdout, stderr) of python -m grpo_jax.NAME.

  It runs in this process, without the seconds that a new one takes to import everything.
  """
  before = set(absl_flags.FLAGS)

  def start(name, *arguments):
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    sys.modules.pop("config_config", None)  # where ml_collections keeps the config file of before
    code = 0
    try:
      runpy.run_module(f"grpo_jax.{name}", run_name="__main__", alter_sys=False)
    except SystemExit as end:
      code = end.code
    return code, *capsys.readouterr()

  yield start
  for name in set(absl_flags.FLAGS) - before:
    delattr(absl_flags.FLAGS, name)
  absl_flags.FLAGS.unparse_flags()
  app._define_help_flags_called = "help" in before


@pytest.fixture
def own_tables():
  """Tables of names, which lose what a test registers."""
  from grpo_jax.algo.advantages import ADVANTAGES
  from grpo_jax.algo.corrections import CORRECTIONS
  from grpo_jax.algo.kl import KL
  from grpo_jax.algo.surrogates import SURROGATES
  from grpo_jax.batches.own_metrics import OWN_METRICS
  from grpo_jax.data.tasks.tasks import TASKS
  from grpo_jax.learner.optimizer import OPTIMIZERS
  from grpo_jax.rewards import REWARDS
  from grpo_jax.sampler.filters import FILTERS

  tables = ADVANTAGES, CORRECTIONS, FILTERS, KL, OPTIMIZERS, OWN_METRICS, REWARDS, SURROGATES, TASKS
  before = [set(table) for table in tables]
  yield
  for table, names in zip(tables, before, strict=True):
    for name in set(table) - names:
      del table[name]
