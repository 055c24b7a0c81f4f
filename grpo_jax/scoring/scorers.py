"""Sets up what a run's workers call: reward functions, tools and environments, or a harness."""

from collections.abc import Sequence
import functools
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_jax import rewards as rewards_lib
from grpo_jax.algo.advantages import ADVANTAGES
from grpo_jax.data.tokenizers.replies import Replies
from grpo_jax.environments import Runner
from grpo_jax.environments.tool_calls import FORMATS, KEY
from grpo_jax.environments.written_calls import are_read
from grpo_jax.gguf_file import is_gguf
from grpo_jax.model.huggingface import hub
from grpo_jax.parallel.cores import cores
from grpo_jax.rewards import resolve, resolve_all
from grpo_jax.rewards.dispatch import FIRST_OF_TASK
from grpo_jax.rollouts.talk import Talkers
from grpo_jax.run.run import Run
from grpo_jax.scoring.reward_model import RewardModel
from grpo_jax.scoring.scorer import Scorer, Weighted
from grpo_jax.settings import ConfigError

if TYPE_CHECKING:
  from grpo_jax.rollouts.traced import Harness


class Scorers:
  """A run's reward functions for training and evaluation, and its tools, environments or harness.

  All of them share the same workers.

  Attributes:
    remarks: Lines that a user should read about the functions and tools.
  """

  def __init__(self, run: Run):
    """Starts the workers' pool. All processes of the run do so together."""
    self._run, self._config = run, run.config
    reward = run.config.reward
    count = cores(run.hosts) if reward.workers < 0 else reward.workers
    pool = rewards_lib.Pool(count, reward.timeout, reward.memory) if count else None
    self._caller = rewards_lib.Caller(pool, stops_on_error=reward.on_error == "stop")
    self.remarks: tuple[str, ...] = ()

  @functools.cached_property
  def training(self) -> Scorer:
    """The scorer of training. Raises ConfigError for functions that cannot be used."""
    reward = self._config.reward
    found = resolve_all(reward.functions, self._reward_model, is_reward_model)
    tasks = reward.tasks or [""] * len(found)
    functions = [Weighted(*one) for one in zip(found, reward.weights, tasks, strict=True)]
    needs_steps = ADVANTAGES[self._config.algo.advantage].needs_steps
    return self._scorer(reward.functions, functions, needs_steps)

  @functools.cached_property
  def evaluation(self) -> Scorer:
    """The scorer of evaluations, with eval.function. It may be the scorer of training."""
    name = self._config.eval.function
    if name == FIRST_OF_TASK:
      return self.training
    return self.deciding(name, "eval.function")

  def deciding(self, name: str, key: str) -> Scorer:
    """Makes the scorer of an evaluation with the function `name`, which the config key `key` sets.

    Raises:
      ConfigError: The function cannot be used.
    """
    return self._scorer([name], [Weighted(resolve(name, key, is_reward_model))])

  @functools.cached_property
  def talkers(self) -> "Talkers | Harness | None":
    """The tools and environments that answer the policy, or the harness that calls it, or None.

    Raises:
      ConfigError: The tools, environments or harness cannot be used.
    """
    run, environments = self._run, self._run.environments
    if environments is None:
      return None
    if environments.settings.harness:
      return self._harness(environments.settings.harness)
    schemas = environments.all_schemas
    # Only with "auto" does the template decide in which format the run looks for calls.
    by_template = self._config.data.chat and schemas and environments.settings.calls == "auto"
    if by_template and not are_read(run.tokenizer):
      raise ConfigError(
        f"{KEY}: the chat template shows tools, and makes a model call them in a way that is not"
        f" read here; set {KEY} to one of {', '.join(FORMATS)}, or to a regular expression"
      )
    replies = Replies(run.tokenizer, self._config.data.chat, schemas)
    # Tools answer with messages of the role tool, and `step` with messages of the role user.
    replies.check((["tool"] if schemas else []) + (["user"] if environments.has_steps else []))
    runner = run.hosts.on_each(lambda: Runner(environments, self._caller.pool))
    self.remarks += runner.remarks
    if replies.hides_tools():
      self.remarks += (
        "the chat template does not show the tools of environment.tools to the model: describe"
        " them, and how to call them (environment.calls), in data.system",
      )
    stops = self._caller.stops_on_error
    decode = run.tokenizer.decode
    # Special tokens that mark calls, by id. `decode` drops them, and then no call would be found.
    shown = run.tokenizer.skipped(environments.format.marks)
    decode_calls = functools.partial(decode, shown=shown)
    marks = [*shown.values()]
    return Talkers(environments, runner, replies, decode, decode_calls, marks, run.hosts, stops)

  def close(self) -> None:
    """Stops the workers and the harness's endpoint."""
    talkers = self.__dict__.get("talkers")
    if talkers is not None and not isinstance(talkers, Talkers):
      talkers.close()
    self._caller.close()

  def _harness(self, name: str) -> "Harness":
    """Makes the harness that environment.harness names. Raises ConfigError."""
    try:
      from grpo_jax.rollouts.traced import Harness, Players  # a server is an optional package
    except ImportError:
      raise ConfigError(
        "environment.harness: the endpoint needs the package aiohttp: pip install -e '.[serve]'"
      ) from None
    tools = self._config.environment.tools
    players = self._run.hosts.on_each(lambda: Players(name, self._caller.pool, tools))
    return Harness(self._run, players, self._caller.stops_on_error)

  def _scorer(
    self, names: Sequence[str], functions: Sequence[Weighted], needs_steps: bool = False
  ) -> Scorer:
    """Makes a scorer, and registers the functions with the workers under `names`."""
    run, by_name = self._run, dict(zip(names, [one.function for one in functions]))
    self.remarks += run.hosts.on_each(lambda: self._caller.add(by_name))
    scorer = Scorer(functions, run.hosts, run.tokenizer.decode, self._caller, needs_steps)
    environments = run.environments
    scorer.gets_more = environments is not None and environments.gives_columns
    return scorer

  def _reward_model(self, path: str) -> RewardModel:
    """Loads a reward model for reward.functions. Raises ConfigError."""
    reward, hosts = self._config.reward, self._run.hosts
    hosts.check_rows({"reward.batch": reward.batch}, sampled=False)
    scorer = RewardModel(path, reward, self._config.model.dtype, hosts)
    if self._config.data.chat:
      scorer.check_conversations()
    return scorer


def is_reward_model(name: str) -> bool:
  """Returns whether a reward's name names a model: on huggingface.co, or a local folder.

  Also True for a GGUF file, so that the error says that it contains no reward model.
  """
  folder = Path(name).expanduser()
  return hub.is_name(name) or (folder / "config.json").is_file() or is_gguf(folder)
