"""Group Relative Policy Optimization for language models, in JAX.

Notebooks and scripts mostly need four calls:

  config = grpo_jax.load_config("arithmetic", {"steps": 50})
  grpo_jax.train(config, "/tmp/run")
  grpo_jax.read_metrics("/tmp/run")
  grpo_jax.load_policy("/tmp/run").sample("7+15-6+9=")

Each name of `__all__` is imported when it is first used, so that `import grpo_jax` takes no time.
"""

import importlib
import signal
import sys
from typing import TYPE_CHECKING, Any

if sys.argv[0] == "-m" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
  # The imports of `python -m grpo_jax.train` take a moment. Until `cli.run` installs a handler,
  # Ctrl-C ends the process at once, without the traceback of an import.
  signal.signal(signal.SIGINT, signal.SIG_DFL)
if sys.argv[0] == "-m":
  from grpo_jax.console import line

  line.start()  # shows that the program starts, during the slow imports that follow

if TYPE_CHECKING:
  from grpo_jax.algo.advantages import register_advantage
  from grpo_jax.algo.corrections import register_correction
  from grpo_jax.algo.kl import register_kl
  from grpo_jax.algo.surrogates import register_surrogate
  from grpo_jax.around.trl import from_trl
  from grpo_jax.batches.own_metrics import register_metric
  from grpo_jax.config import Config
  from grpo_jax.console.exit_codes import Stopped
  from grpo_jax.data.tasks.tasks import Task, register_task
  from grpo_jax.environments.names import register_environment, register_tool
  from grpo_jax.evaluation.policy import Completion, Policy, load_policy
  from grpo_jax.learner.optimizer import register_optimizer
  from grpo_jax.recipes import load_config
  from grpo_jax.rewards.names import register_reward
  from grpo_jax.sampler.filters import register_filter
  from grpo_jax.settings import ConfigError, RunFailed
  from grpo_jax.storage.reading import completion_steps, read_completions, read_config, read_metrics
  from grpo_jax.train import train
  from grpo_jax.training.callback import Step

__all__ = [
  "Completion",
  "Config",
  "ConfigError",
  "Policy",
  "RunFailed",
  "Step",
  "Stopped",
  "Task",
  "completion_steps",
  "from_trl",
  "load_config",
  "load_policy",
  "read_completions",
  "read_config",
  "read_metrics",
  "register_advantage",
  "register_correction",
  "register_environment",
  "register_filter",
  "register_kl",
  "register_metric",
  "register_optimizer",
  "register_reward",
  "register_surrogate",
  "register_task",
  "register_tool",
  "train",
]

_MODULES = {
  "around.trl": ("from_trl",),
  "algo.advantages": ("register_advantage",),
  "algo.corrections": ("register_correction",),
  "algo.kl": ("register_kl",),
  "algo.surrogates": ("register_surrogate",),
  "batches.own_metrics": ("register_metric",),
  "config": ("Config",),
  "console.exit_codes": ("Stopped",),
  "data.tasks.tasks": ("Task", "register_task"),
  "environments.names": ("register_environment", "register_tool"),
  "evaluation.policy": ("Completion", "Policy", "load_policy"),
  "learner.optimizer": ("register_optimizer",),
  "recipes": ("load_config",),
  "rewards.names": ("register_reward",),
  "sampler.filters": ("register_filter",),
  "settings": ("ConfigError", "RunFailed"),
  "storage.reading": ("completion_steps", "read_completions", "read_config", "read_metrics"),
  "training.callback": ("Step",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
  if name == "train":  # the module, which is callable: see train.py
    return importlib.import_module("grpo_jax.train")
  if name not in _MODULE_OF:
    raise AttributeError(f"module 'grpo_jax' has no attribute {name!r}")
  return getattr(importlib.import_module(f"grpo_jax.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
