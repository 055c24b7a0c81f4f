"""Rollouts that another program plays through the endpoint of the run: see environments/harness.py.

A rollout is the branch of its calls (see branches.py) in which the policy wrote most. Further
branches are learned, too, as many as environment.branches says. Other calls, as those of a second
agent with a prompt of its own, are counted and left out.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import sys
from typing import Any

import jax
import numpy as np

from grpo_jax.data.loader import PromptBatch
from grpo_jax.environments.harness import Players
from grpo_jax.environments.workers import problem_of
from grpo_jax.rollouts.branches import Branch, as_completions, branches_of
from grpo_jax.rollouts.rollout import Branches, Rollouts
from grpo_jax.rollouts.turns import POLICY, Conversation, Turn
from grpo_jax.run.run import Run
from grpo_jax.sampler.sampling import decoding_of, settings_of
from grpo_jax.serving.decoder import Sizes
from grpo_jax.serving.endpoint import MODEL, Endpoint
from grpo_jax.serving.engine import Engine
from grpo_jax.serving.traces import Trace
from grpo_jax.settings import ConfigError, RunFailed

_MOST_ROWS = 64  # that are decoded together, where sampling.rows says nothing
OTHERS = "user"  # the role of what the program added


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
    if run.config.sampling.has_filters:
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
    ) -> Rollouts:
      if prompts.images is not None:
        raise RunFailed(
          "environment.harness: a prompt has images, which the endpoint of a run does not take;"
          " leave rows with images out"
        )
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
    shape = (len(prompts.prompt_lengths_P), members)
    outcomes = self._players([self._request(endpoint, prompts, *at) for at in np.ndindex(shape)])
    found: dict[tuple[int, int], list[Branch]] = {}
    turns_PG, left_out = np.empty(shape, object), 0
    for (p, g), outcome in zip(np.ndindex(shape), outcomes, strict=True):
      ids = prompts.prompts_PS[p, : prompts.prompt_lengths_P[p]].tolist()
      traces = endpoint.recorder.take(f"{p}/{g}")
      found[p, g], others = self._branches(traces, ids)
      left_out += others
      turns_PG[p, g] = self._conversation(found[p, g][0], outcome)._replace(
        prompt_tokens=sum(len(trace.prompt) for trace in traces),
        computed_tokens=sum(trace.computed for trace in traces),
      )
    self._warn(turns_PG, left_out)
    branches = self._as_rows(found, turns_PG)
    texts_PG = np.vectorize(lambda one: one.last, otypes=[object])
    return Rollouts(
      jax.tree.map(lambda x: x[:, :members], branches.completions),
      texts_PG(turns_PG),
      turns_PG,
      branches if self._run.config.environment.branches > 1 else None,
    )

  def _branches(self, traces: Sequence[Trace], prompt: list[int]) -> tuple[list[Branch], int]:
    config = self._run.config
    return branches_of(traces, prompt, config.sampling.max_tokens, config.environment.branches)

  def _as_rows(
    self, found: Mapping[tuple[int, int], Sequence[Branch]], turns_PG: np.ndarray
  ) -> Branches:
    """All branches as rows: the first of each rollout, then the others, then empty ones."""
    (P, G), config = turns_PG.shape, self._run.config
    B = G * config.environment.branches
    rollout_PB, turns_PB = np.zeros((P, B), np.int32), np.empty((P, B), object)
    rollout_PB[:, :G], turns_PB[:, :G] = np.arange(G), turns_PG
    rows = {place: branches[0] for place, branches in found.items()}
    for p in range(P):
      others = [(g, branch) for g in range(G) for branch in found[p, g][1:]]
      for b, (g, branch) in enumerate(others, start=G):
        rows[p, b], rollout_PB[p, b] = branch, g
        turns_PB[p, b] = Conversation(self._turns(branch))
    return Branches(as_completions(rows, (P, B), config.sampling.max_tokens), rollout_PB, turns_PB)

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
    completions = run.config.batch.prompts * run.config.batch.group_size
    # The prefix cache has a text of every conversation, and takes at most as much memory as the
    # prompts of twice the rows.
    rows = min(sampling.rows or _MOST_ROWS, completions)
    rows, texts = (
      -(-size // shape.row_shards) * shape.row_shards for size in (rows, min(completions, 2 * rows))
    )
    sizes = Sizes(rows=rows, prompt_tokens=longest, waiting=2**20, texts=texts)
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

  def _conversation(self, branch: Branch, outcome: dict[str, Any]) -> Conversation:
    """The turns of a branch. The last one of the policy has the reward."""
    problem, kind = problem_of(outcome, "the harness")
    if kind == "error" and self._stops_on_error:
      raise RunFailed(problem)
    turns = list(self._turns(branch))
    own = [place for place, turn in enumerate(turns) if turn.role == POLICY]
    if own:
      turns[own[-1]] = turns[own[-1]]._replace(reward=outcome.get("reward"))
    return Conversation(tuple(turns), problem=problem, kind=kind)

  def _turns(self, branch: Branch) -> tuple[Turn, ...]:
    """The turns of a branch, without a reward."""
    is_own = branch.is_own
    starts = [0, *(np.flatnonzero(is_own[1:] != is_own[:-1]) + 1).tolist()] if len(is_own) else []
    turns = []
    for start, end in zip(starts, [*starts[1:], len(is_own)]):
      text = self._run.tokenizer.decode(list(branch.tokens[start:end]))
      turns.append(Turn(POLICY if is_own[start] else OTHERS, text, start, end))
    return tuple(turns)

  def _warn(self, turns_PG: np.ndarray, left_out: int) -> None:
    """Says what is not learned. `left_out` calls are in no branch."""
    problems = [one.problem for one in turns_PG.ravel() if one.problem]
    if problems:
      print(f"warning: the harness failed {len(problems)} times: {problems[0]}", file=sys.stderr)
    if left_out:
      print(
        f"warning: {left_out} calls of the harness are not learned from: they are in further"
        " branches than environment.branches counts, or do not begin with the prompt of the data",
        file=sys.stderr,
      )
    if not any(one.own for one in turns_PG.ravel()):
      raise RunFailed(
        "no call of the harness began with the prompt of the data: send the field `messages` of the"
        " example with data.chat, or its prompt_text"
      )
