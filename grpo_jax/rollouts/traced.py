"""Rollouts that another program plays through the endpoint of the run: see environments/harness.py.

A rollout is the longest chain of its calls: each call's prompt begins with the prompt of the call
before it and with what the policy wrote there. What the program added between them is read and not
learned. Calls outside the chain, as those of a second agent, are counted and left out.
"""

from collections.abc import Callable, Sequence
import dataclasses
import sys
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax.data.loader import PromptBatch
from grpo_jax.environments.harness import Players
from grpo_jax.environments.workers import problem_of
from grpo_jax.programs.run import Run
from grpo_jax.programs.sampling import decoding_of, settings_of
from grpo_jax.rollouts.rollout import OnGroups, Rollouts
from grpo_jax.rollouts.turns import POLICY, Conversation, Turn
from grpo_jax.serving.decoder import Sizes
from grpo_jax.serving.endpoint import MODEL, Endpoint
from grpo_jax.serving.engine import Engine
from grpo_jax.serving.traces import Trace
from grpo_jax.settings import ConfigError, RunFailed
from grpo_jax.types import Completions

_MOST_ROWS = 64  # that are decoded together, where sampling.rows says nothing
OTHERS = "user"  # the role of what the program added


class Chain(NamedTuple):
  """The tokens of a rollout after its prompt.

  Attributes:
    tokens: Their ids.
    sampled: Whether the policy wrote each.
    logprobs: 0 where it did not.
    is_cut: Whether a limit ended it.
    left_out: How many calls are not in it.
  """

  tokens: list[int]
  sampled: list[bool]
  logprobs: list[float]
  is_cut: bool
  left_out: int


def chain_of(traces: Sequence[Trace], prompt: Sequence[int], most: int) -> Chain:
  """The longest chain of calls, cut to `most` tokens.

  Args:
    traces: The calls in their order.
    prompt: What the prompts of all calls begin with. Calls of which that is not so are left out.
    most: T.
  """
  chains: list[tuple[Chain, int]] = []
  start = list(prompt)
  for trace in traces:
    if trace.prompt[: len(start)] != start:
      continue
    read = trace.prompt[len(start) :]

    def goes_on(chain: Chain, read: list[int] = read) -> bool:
      return read[: len(chain.tokens)] == chain.tokens

    fitting = [one for one in chains if goes_on(one[0])]
    before, calls = max(fitting, key=lambda one: len(one[0].tokens), default=(_EMPTY, 0))
    given = read[len(before.tokens) :]
    chain = Chain(
      before.tokens + given + trace.tokens,
      before.sampled + [False] * len(given) + [True] * len(trace.tokens),
      before.logprobs + [0.0] * len(given) + trace.logprobs,
      trace.finish == "length",
      0,
    )
    chains.append((chain, calls + 1))
  chain, calls = max(chains, key=lambda one: sum(one[0].sampled), default=(_EMPTY, 0))
  is_cut = chain.is_cut or len(chain.tokens) > most
  return Chain(
    chain.tokens[:most],
    chain.sampled[:most],
    chain.logprobs[:most],
    is_cut,
    len(traces) - calls,
  )


_EMPTY = Chain([], [], [], False, 0)


class Harness:
  """What plays the rollouts of a run. Its endpoint starts with the first of them."""

  def __init__(self, run: Run, players: Players, stops_on_error: bool) -> None:
    """Takes the parts.

    Raises:
      ConfigError: The run has several processes, or filters its draws.
    """
    self._run, self._players, self._stops_on_error = run, players, stops_on_error
    self._endpoint: Endpoint | None = None
    self._version = 0
    if jax.process_count() > 1:
      raise ConfigError("environment.harness: a run with a harness has one process")
    if settings_of(run.config.sampling, 1.0).filters:
      raise ConfigError(
        "environment.harness: the endpoint records log-probs without filters; set sampling.top_k=0,"
        " top_p=1, min_p=0 and min_tokens=0"
      )

  def rollout(self, group_size: int, greedy: bool) -> Callable[..., Rollouts]:
    """A `Rollout` of `group_size` completions."""

    def play(
      params: Any,
      prompts: PromptBatch,
      key: jax.Array,
      temperature: float = 1.0,
      on_groups: OnGroups | None = None,
    ) -> Rollouts:
      del on_groups  # no group ends before the others
      settings = settings_of(self._run.config.sampling, 0.0 if greedy else temperature)
      return self._play(params, prompts, group_size, (settings, key))

    return play

  def close(self) -> None:
    """Ends the endpoint."""
    if self._endpoint is not None:
      self._endpoint.close()

  def _play(
    self, params: Any, prompts: PromptBatch, members: int, how: tuple[Any, jax.Array]
  ) -> Rollouts:
    settings, key = how
    endpoint = self._serving(params)
    seed = "/".join(map(str, np.asarray(jax.random.key_data(key)).tolist()))
    endpoint.recorder.begin(settings, seed)
    indices = list(np.ndindex(len(prompts.prompt_lengths_P), members))
    outcomes = self._players([self._request(endpoint, prompts, *index) for index in indices])
    T = self._run.config.sampling.max_tokens
    turns_PG = np.empty((len(prompts.prompt_lengths_P), members), object)
    chains = {}
    for (p, g), outcome in zip(indices, outcomes, strict=True):
      ids = prompts.prompts_PS[p, : prompts.prompt_lengths_P[p]].tolist()
      chains[p, g] = chain_of(endpoint.recorder.take(f"{p}/{g}"), ids, T)
      turns_PG[p, g] = self._conversation(chains[p, g], outcome)
    self._warn(turns_PG, chains)
    texts_PG = np.vectorize(lambda one: one.own[-1].text if one.own else "", otypes=[object])
    return Rollouts(self._completions(chains, turns_PG.shape), texts_PG(turns_PG), turns_PG)

  def _serving(self, params: Any) -> Endpoint:
    """The endpoint with these weights."""
    self._version += 1
    if self._endpoint is not None:
      self._endpoint.set_weights(params, self._version)
      return self._endpoint
    run, shape = self._run, self._run.parameters.sampling.model
    sampling = run.config.sampling
    decoding = decoding_of(sampling, shape.stop_ids)
    limit = run.config.environment.turn_tokens or sampling.max_tokens
    longest = run.config.data.max_prompt_tokens + sampling.max_tokens
    rows = min(sampling.rows or _MOST_ROWS, run.config.batch.prompts * run.config.batch.group_size)
    rows = -(-rows // shape.row_shards) * shape.row_shards
    sizes = Sizes(rows=rows, prompt_tokens=longest, waiting=2**20)
    decoding = dataclasses.replace(decoding, max_tokens=limit)
    engine = Engine(shape, decoding, sizes, params, self._version)
    self._endpoint = Endpoint(engine, run.tokenizer, shape.vocab_size)
    return self._endpoint

  def _request(self, endpoint: Endpoint, prompts: PromptBatch, p: int, g: int) -> dict[str, Any]:
    example = prompts.row(p)
    example["prompt_text"] = example.pop("prompts")
    return {
      "example": example,
      "base_url": endpoint.url,
      "api_key": f"{endpoint.key}:{p}/{g}",
      "model": MODEL,
    }

  def _conversation(self, chain: Chain, outcome: dict[str, Any]) -> Conversation:
    """The turns of a chain. The last one of the policy has the reward."""
    problem, kind = problem_of(outcome, "the harness")
    if kind == "error" and self._stops_on_error:
      raise RunFailed(problem)
    is_own = np.array(chain.sampled, bool)
    starts = [0, *(np.flatnonzero(is_own[1:] != is_own[:-1]) + 1).tolist()] if len(is_own) else []
    turns = []
    for start, end in zip(starts, [*starts[1:], len(is_own)]):
      text = self._run.tokenizer.decode(chain.tokens[start:end])
      turns.append(Turn(POLICY if is_own[start] else OTHERS, text, start, end))
    own = [place for place, turn in enumerate(turns) if turn.role == POLICY]
    if own:
      turns[own[-1]] = turns[own[-1]]._replace(reward=outcome.get("reward"))
    return Conversation(tuple(turns), problem=problem, kind=kind)

  def _warn(self, turns_PG: np.ndarray, chains: dict[tuple[int, int], Chain]) -> None:
    problems = [one.problem for one in turns_PG.ravel() if one.problem]
    left_out = sum(chain.left_out for chain in chains.values())
    silent = sum(not any(chain.sampled) for chain in chains.values())
    if problems:
      print(f"warning: the harness failed {len(problems)} times: {problems[0]}", file=sys.stderr)
    if left_out:
      print(
        f"warning: {left_out} calls of the harness are not learned from: their prompts do not go on"
        " from an earlier call, or do not begin with the prompt of the data",
        file=sys.stderr,
      )
    if silent == len(chains):
      raise RunFailed(
        "no call of the harness began with the prompt of the data: send the field `messages` of the"
        " example with data.chat, or its prompt_text"
      )

  def _completions(
    self, chains: dict[tuple[int, int], Chain], shape: tuple[int, ...]
  ) -> Completions:
    T = self._run.config.sampling.max_tokens
    found = Completions(
      tokens_PGT=np.zeros((*shape, T), np.int32),
      lengths_PG=np.zeros(shape, np.int32),
      sampled_PGT=np.zeros((*shape, T), bool),
      logprobs_PGT=np.zeros((*shape, T), np.float32),
      behavior_logprobs_PGT=np.zeros((*shape, T), np.float32),
      stopped_by_PG=np.full(shape, -1, np.int32),
    )
    for index, chain in chains.items():
      length = len(chain.tokens)
      found.tokens_PGT[index][:length] = chain.tokens
      found.sampled_PGT[index][:length] = chain.sampled
      found.logprobs_PGT[index][:length] = chain.logprobs
      found.lengths_PG[index] = length
      if length and not chain.is_cut:
        found.stopped_by_PG[index] = chain.tokens[-1]
    return found.replace(behavior_logprobs_PGT=found.logprobs_PGT.copy())
