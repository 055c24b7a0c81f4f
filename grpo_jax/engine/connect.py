"""Connects a run to the servers of its external engine."""

from collections.abc import Callable
from pathlib import Path
import time
from typing import Any

import jax

from grpo_jax.config import Config
from grpo_jax.engine.client import Client, ServerGone, ServerRefused
from grpo_jax.engine.drawn import DrawnFile
from grpo_jax.engine.engines import ENGINES
from grpo_jax.engine.groups import EngineGroups, Rules
from grpo_jax.engine.keep import serve_now
from grpo_jax.engine.proof import Probe
from grpo_jax.engine.server import EngineServer, Facts, longest_row
from grpo_jax.engine.servers import ADVICE, Servers
from grpo_jax.engine.weights import Folders, Written
from grpo_jax.progress import doing
from grpo_jax.run.run import Run
from grpo_jax.sampler.sampling import decoding_of
from grpo_jax.sampler.stop import end_at
from grpo_jax.sampler.stream import Feed
from grpo_jax.settings import ConfigError

_TOKENS_COMPARED = 8  # about how many tokens `check_tokenizer` compares


class ExternalEngine:
  """The external engine of one run.

  Attributes:
    servers: The servers. None before `open`, and always None if another run is replayed.
    record: The record of drawn groups. `open` sets it.
  """

  record: DrawnFile

  def __init__(self, run: Run, should_stop: Callable[[], bool]):
    """Checks the config. Writes no file and opens no connection yet.

    Args:
      run: The run.
      should_stop: Returns whether the user has asked the run to stop.

    Raises:
      ConfigError: The config needs something that an engine cannot do.
    """
    config = run.config
    check_run(run)
    self._run, self._should_stop = run, should_stop
    stop, shape = config.sampling.stop, run.parameters.sampling.model
    self._rules = Rules(
      config.sampling.max_tokens,
      shape.vocab_size,
      decoding_of(config.sampling, shape.stop_ids).stop_ids,
      stop,
      end_at(stop, run.tokenizer.decode) if stop else None,
    )
    self._folders: Folders | None = None
    self.servers: Servers | None = None
    self._servers: list[EngineServer] = []  # the servers alone; `servers` shares rows among them
    self._is_rehearsed = False  # whether servers have proved that they load weights

  def open(self, workdir: Path) -> None:
    """Opens the record of drawn groups. Connects to the servers unless another run is replayed.

    Args:
      workdir: The run's folder, on this machine.

    Raises:
      ConfigError: The record or the API key cannot be used, or the folder of weights cannot be
        written.
    """
    replay = self._run.config.rollout.replay
    self.record = DrawnFile(workdir / "drawn.jsonl", replay)
    if not replay:
      self._connect(workdir)

  def _connect(self, workdir: Path) -> None:
    """Starts the threads that connect to the servers, check them and bring them weights."""
    run = self._run
    config, shape = run.config, run.parameters.sampling.model
    rollout, longest = config.rollout, longest_row(config)
    kind = ENGINES[rollout.engine]
    key = kind.read_key()
    folder = Path(rollout.engine_folder or workdir / "engine").expanduser()
    probe = Probe(shape, longest, is_exact(config))
    self._folders = Folders(run, folder, probe)
    self._servers = [
      kind.server(Client(url, key), rollout.engine_timeout) for url in rollout.engine_urls
    ]
    bring: Loads | Restarts | Adapters = Loads()
    if config.lora.rank:
      bring = Adapters()
    elif rollout.engine_restart:  # check_config refuses it with adapters
      bring = Restarts(folder, rollout.engine_timeout)

    def check(server: EngineServer) -> None:
      facts = server.facts()
      check_facts(server.url, facts, config)
      # One folder serves all servers, so a single server that needs the head decides.
      self._folders.is_untied = self._folders.is_untied or facts.is_untied
      check_tokenizer(server, run)

    self.servers = Servers(self._servers, bring, check, probe, self._should_stop)

  def weights(self, params: Any) -> Written | None:
    """Writes weights for the servers. The files stay valid when an update donates the arrays.

    The first call also proves that servers load weights: it first brings them changed ones.

    Args:
      params: The weights as `Parameters.for_sampling` returns them. A batch that is drawn ahead
        passes what an earlier call returned, and gets it back.

    Returns:
      The written weights. None if no server draws or `params` is None.
    """
    if self.servers is None or params is None or isinstance(params, Written):
      return params if isinstance(params, Written) else None
    if not self._is_rehearsed:
      with doing("proving that the engine loads weights"):
        # A server's settings decide how weights are written: see `Folders.is_untied`.
        self.servers.wait_for_one()
        self.servers.use(self._folders.changed(params))
      self._is_rehearsed = True
    with doing("writing the weights for the engine", is_routine=True):
      return self._folders(params)

  def groups(self, feed: Feed, members: int, keeps_experts: bool) -> EngineGroups:
    """Makes a group sampler. The arguments are those of `rollouts.complete.Remote`."""
    assert not keeps_experts  # check_config refuses learner.router_replay
    return EngineGroups(self, feed, members, self._rules)

  def close(self) -> None:
    """Ends all calls to servers, and removes the run's adapters and folders of weights."""
    if self.servers is not None:
      self.servers.close()
      for server in self._servers:
        server.remove_all_adapters()
      self._folders.close()
    self.record.close()


class Loads:
  """Brings weights to a server: it reads them from a folder while it runs."""

  advice = ADVICE

  def __call__(self, server: EngineServer, written: Written, before: Written | None) -> str:
    server.load(str(written.folder))
    return "policy"


class Adapters:
  """Brings adapters: the server loads them under a new name, and unloads the previous ones."""

  advice = "look at its log, and start it as python -m grpo_jax.engine --print writes it"

  def __call__(self, server: EngineServer, written: Written, before: Written | None) -> str:
    server.add_adapters(written.name, str(written.folder))
    if before is not None:
      server.remove_adapters(before.name)
    return written.name


class Restarts:
  """Brings weights: `keep.py` restarts the server with the folder of the weights."""

  advice = "look at its log, and start it with python -m grpo_jax.engine"

  def __init__(self, folder: Path, seconds: float):
    """`folder` is rollout.engine_folder, and `seconds` the timeout of a restart."""
    self._folder, self._seconds = folder, seconds

  def __call__(self, server: EngineServer, written: Written, before: Written | None) -> str:
    """Names the folder to serve, and waits for the restart. Raises ServerRefused on a timeout."""
    serve_now(self._folder, written.folder)
    until, serves = time.monotonic() + self._seconds, ""
    while time.monotonic() < until:
      try:
        serves = server.folder()
        if serves == str(written.folder):
          return "policy"  # the name by which servers call a whole model
      except ServerGone:  # it is restarting
        pass
      time.sleep(0.25)
    raise ServerRefused(
      f"{server.url} was not started again with {written.folder} within {self._seconds:g} seconds"
      f" (rollout.engine_timeout), and serves {serves or 'nothing'}: start it with python -m"
      " grpo_jax.engine and rollout.engine_restart=True"
    )


def is_exact(config: Config) -> bool:
  """Returns whether learner and engine both compute in float32."""
  return {config.model.dtype, config.sampling.dtype or config.model.dtype} == {"float32"}


def check_run(run: Run) -> None:
  """Raises ConfigError if an external engine cannot sample for this run."""
  key = f"config key rollout.engine is {run.config.rollout.engine!r}"
  if jax.process_count() > 1:
    raise ConfigError(f"{key}: a run of several processes samples itself; leave it empty")
  if run.parameters.model.vision is not None:
    raise ConfigError(f"{key}: it gets tokens and no images; set model.vision=ignored")


def check_facts(url: str, facts: Facts, config: Config) -> None:
  """Raises ServerRefused if dtype, log-probs or row length of the server at `url` do not fit."""
  dtype, longest = config.sampling.dtype or config.model.dtype, longest_row(config)
  kind = ENGINES[config.rollout.engine]
  for fits, is_so, option in (  # (whether a setting fits, how it is, the option that sets it)
    (facts.dtype == dtype, f"computes in {facts.dtype}", f"--dtype {dtype}"),
    (
      facts.logprobs_mode == "processed_logprobs",
      f"returns {facts.logprobs_mode}",
      "--logprobs-mode processed_logprobs",
    ),
    (
      # To score a row, that is to return its tokens' log-probs, a server also draws one more token.
      facts.longest >= longest + 1,
      f"has room for {facts.longest} tokens",
      f"{kind.length_option} {longest + kind.spare}",
    ),
  ):
    if not fits:
      raise ServerRefused(
        f"{url} {is_so}: start it with {option}, as python -m grpo_jax.engine --print writes it"
      )


def check_tokenizer(server: EngineServer, run: Run) -> None:
  """Raises ServerRefused if a server's tokenizer decodes tokens to other texts.

  It compares a few single tokens of ASCII letters and digits. Others may be parts of characters.
  """
  size, tokens = run.tokenizer.vocab_size, run.tokenizer
  # About 512 candidates, spread over the vocabulary, are enough to find a few plain ones.
  texts = {token: tokens.decode([token]) for token in range(0, size, max(1, size // 512))}
  plain = {token: text for token, text in texts.items() if text.isascii() and text.isalnum()}
  for token in [*plain][:: max(1, len(plain) // _TOKENS_COMPARED)]:
    text = server.text(token)
    if text.strip() != plain[token]:  # decoders differ in whether they keep a leading space
      raise ServerRefused(
        f"{server.url} has another tokenizer: token {token} is {text!r} there and {plain[token]!r}"
        " here; start it with the model or the --tokenizer of the run"
      )
