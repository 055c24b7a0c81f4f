"""Rollouts by a harness that calls the policy through the endpoint: see environments/harness.py.

The completion of a rollout is the branch of calls (see branches.py) that begins with the prompt of
the first call and has the most tokens of the policy. Further branches, such as those of other
agents, become further rows, up to environment.branches. All other calls are counted and left out.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import sys
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax.data import row_tools
from grpo_jax.data.loader import PromptBatch
from grpo_jax.environments.harness import Players
from grpo_jax.environments.workers import problem_of
from grpo_jax.rollouts.branches import Branch, as_completions, branches_of, shared_prompt
from grpo_jax.rollouts.rollout import Branches, HarnessPrompts, Rollouts
from grpo_jax.rollouts.turns import POLICY, Conversation, Turn, turn_of
from grpo_jax.run.run import Run
from grpo_jax.sampler.filters import has_filters
from grpo_jax.sampler.sampling import decoding_of, settings_of
from grpo_jax.serving.device_flight import Sizes
from grpo_jax.serving.endpoint import MODEL, Endpoint
from grpo_jax.serving.engine import Engine
from grpo_jax.serving.tools import with_names
from grpo_jax.serving.traces import Trace
from grpo_jax.settings import ConfigError, RunFailed

_MOST_ROWS = 64  # rows decoded together if sampling.rows is 0
OTHERS = "user"  # the role of the tokens that the program added


class Harness:
  """Plays the rollouts of a run with a harness. The first rollout starts the endpoint."""

  def __init__(self, run: Run, players: Players, stops_on_error: bool) -> None:
    """Checks the run. `stops_on_error` says whether an exception in the harness ends it.

    Raises:
      ConfigError: The run has several processes, or uses filters or stop texts in sampling.
    """
    self._run, self._players, self._stops_on_error = run, players, stops_on_error
    self._endpoint: Endpoint | None = None
    self._version = 0  # of the weights that the endpoint has
    self._warned = set[str]()  # the names whose warnings were printed
    self._has_learned = False  # whether any call so far can be learned from
    if jax.process_count() > 1:
      raise ConfigError("environment.harness: a run with a harness has one process")
    if has_filters(run.config.sampling):
      raise ConfigError(
        "environment.harness: the endpoint records log-probs without filters; set sampling.top_k=0,"
        " top_p=1, min_p=0, filters=(), min_tokens=0, regex='' and banned=()"
      )
    if run.config.sampling.stop:
      raise ConfigError(
        "environment.harness: the endpoint ends answers at the texts that a request asks for; set"
        " sampling.stop=()"
      )

  def rollout(self, group_size: int, greedy: bool) -> Callable[..., Rollouts]:
    """Makes a function that completes each prompt of a batch `group_size` times."""

    def play(
      params: Any, prompts: PromptBatch, key: jax.Array, temperature: float = 1.0
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
    """Stops the endpoint."""
    if self._endpoint is not None:
      self._endpoint.close()

  def _play(
    self, params: Any, prompts: PromptBatch, members: int, how: tuple[Any, jax.Array]
  ) -> Rollouts:
    """Calls the harness for all completions of a batch, and makes rollouts of its calls.

    `how` is (the sampling settings, the root of the random numbers).
    """
    settings, key = how
    endpoint = self._serving(params)
    # The recorder hashes this text with a conversation's name, which makes the seed of each call.
    seed = "/".join(map(str, np.asarray(jax.random.key_data(key)).tolist()))
    endpoint.recorder.begin(settings, seed)
    shape = (len(prompts.prompt_lengths_P), members)
    outcomes = self._players([self._request(endpoint, prompts, *at) for at in np.ndindex(shape)])
    played = {}
    for (p, g), outcome in zip(np.ndindex(shape), outcomes, strict=True):
      traces = endpoint.recorder.take(_name(endpoint, p, g))
      branches_found, left_out = branches_of(traces, self._run.config.environment.branches)
      played[p, g] = _Played(traces, branches_found, outcome, left_out)
    shared_prompts = self._prompts_of_groups(played, prompts)
    cut_branches = {
      at: self._cut_branches(one, int(shared_prompts.lengths_P[at[0]]))
      for at, one in played.items()
    }
    turns_PG = np.empty(shape, object)
    for at, one in played.items():
      # The policy's tokens that the limit of rows cut off. Calls in no branch count in `left_out`.
      lost = sum(sum(branch.sampled) for branch in one.branches)
      lost -= sum(sum(branch.sampled) for branch in cut_branches[at])
      turns_PG[at] = self._conversation(cut_branches[at][0], one)._replace(lost_tokens=lost)
    self._warn(turns_PG, [*played.values()])
    self._warn_of_prompts(turns_PG, played, shared_prompts)
    rows = self._branches_as_rows(cut_branches, played, turns_PG)
    texts_of = np.vectorize(lambda one: one.last, otypes=[object])
    return Rollouts(
      # The first G rows of a prompt are the first branch of each rollout.
      jax.tree.map(lambda x: x[:, :members], rows.completions),
      texts_of(turns_PG),
      turns_PG,
      rows if self._run.config.environment.branches > 1 else None,
      shared_prompts,
    )

  def _prompts_of_groups(
    self, played: Mapping[tuple[int, int], "_Played"], prompts: PromptBatch
  ) -> HarnessPrompts:
    """Finds each group's prompt: the longest beginning that the tokens of its branches share.

    It has at most S tokens; the rest of a branch counts as its completion. If a group made no
    calls, its prompt is that of the data. `played` has keys (prompt, member of the group).
    """
    S = self._run.config.data.max_prompt_tokens
    P = len(prompts.prompt_lengths_P)
    found = HarnessPrompts(
      np.full((P, S), self._run.tokenizer.pad_id, np.int32), np.zeros(P, np.int32)
    )
    for p in range(P):
      group = [one for (index, _), one in played.items() if index == p]
      branches = [branch for one in group for branch in one.branches if branch.tokens]
      ids = shared_prompt(branches, S)
      if not branches:
        ids = tuple(prompts.prompts_PS[p, : prompts.prompt_lengths_P[p]].tolist())
      elif not ids:
        raise RunFailed(
          "environment.harness: the first calls of a group's completions have not one token in"
          " common at their beginning; let all begin with the same system message, or with the same"
          " text"
        )
      found.prompts_PS[p, : len(ids)], found.lengths_P[p] = ids, len(ids)
    return found

  def _cut_branches(self, played: "_Played", start: int) -> list[Branch]:
    """Returns a rollout's branches as they fit into rows: sampling.max_tokens from `start` on.

    `start` is the length of the group's prompt.
    """
    return [branch.after(start, self._run.config.sampling.max_tokens) for branch in played.branches]

  def _branches_as_rows(
    self,
    found: Mapping[tuple[int, int], Sequence[Branch]],
    played: Mapping[tuple[int, int], "_Played"],
    turns_PG: np.ndarray,
  ) -> Branches:
    """Converts branches to rows: for each group, the first of each rollout, the others, padding.

    `found` has the cut branches (see `_cut_branches`), and `played` the calls, by rollout [p, g].
    """
    (P, G), config = turns_PG.shape, self._run.config
    B = G * config.environment.branches
    rollout_PB, turns_PB = np.zeros((P, B), np.int32), np.empty((P, B), object)
    rollout_PB[:, :G], turns_PB[:, :G] = np.arange(G), turns_PG
    rows = {index: branches[0] for index, branches in found.items()}  # keys [p, b], with b = g
    for p in range(P):
      others = [(g, branch) for g in range(G) for branch in found[p, g][1:]]
      for b, (g, branch) in enumerate(others, start=G):
        rows[p, b], rollout_PB[p, b] = branch, g
        turns_PB[p, b] = Conversation(self._turns(branch, played[p, g].traces, shows_prompt=True))
    return Branches(as_completions(rows, (P, B), config.sampling.max_tokens), rollout_PB, turns_PB)

  def _serving(self, params: Any) -> Endpoint:
    """Returns the endpoint, after it has got these weights. The first call starts it."""
    self._version += 1
    if self._endpoint is not None:
      self._endpoint.set_weights(params, self._version)
      return self._endpoint
    run, shape = self._run, self._run.parameters.sampling.model
    sampling = run.config.sampling
    decoding = decoding_of(sampling, shape.stop_ids)
    answer_tokens = run.config.environment.turn_tokens or sampling.max_tokens
    # The prompt of a later call holds the earlier turns, which count as tokens of the completion.
    longest = run.parameters.model.text_tokens - answer_tokens
    completions = run.config.batch.prompts * run.config.batch.group_size
    wanted_rows = min(sampling.rows or _MOST_ROWS, completions)
    # One prefix-cache entry per conversation, but at most two per row, to limit memory. Both sizes
    # are rounded up to multiples of the mesh's row shards.
    rows, texts = (
      -(-size // shape.row_shards) * shape.row_shards
      for size in (wanted_rows, min(completions, 2 * wanted_rows))
    )
    sizes = Sizes(rows=rows, prompt_tokens=longest, waiting=2**20, texts=texts)  # any number waits
    decoding = dataclasses.replace(decoding, max_tokens=answer_tokens)
    engine = Engine(shape, decoding, sizes, params, self._version)
    calls = run.config.environment.calls
    self._endpoint = Endpoint(engine, run.tokenizer, shape.vocab_size, calls)
    return self._endpoint

  def _request(self, endpoint: Endpoint, prompts: PromptBatch, p: int, g: int) -> dict[str, Any]:
    """Makes the harness's arguments for completion [p, g]. The API key identifies its calls."""
    example = prompts.row(p)
    example["prompt_text"] = example.pop("prompts")
    if self._run.config.environment.tools:
      example[row_tools.COLUMN] = self._run.environments.tools_of(example)
    return {
      "example": example,
      "base_url": endpoint.url,
      "api_key": f"{endpoint.key}:{_name(endpoint, p, g)}",
      "model": MODEL,
    }

  def _conversation(self, branch: Branch, played: "_Played") -> Conversation:
    """Builds the conversation of a rollout's first branch. The last policy turn has the reward."""
    outcome = played.outcome
    problem, kind = problem_of(outcome, "the harness")
    if kind == "error" and self._stops_on_error:
      raise RunFailed(problem)
    turns = list(self._turns(branch, played.traces))
    by_policy = [i for i, turn in enumerate(turns) if turn.role == POLICY]
    if by_policy:  # it has none if the harness never called the policy
      turns[by_policy[-1]] = turns[by_policy[-1]]._replace(reward=outcome.get("reward"))
    return Conversation(
      turns=tuple(turns),
      calls=sum(len((turn.fields or {}).get("tool_calls", ())) for turn in turns),
      # A tool that fails answers with such a text: see `acting.callable_tools`.
      failures=sum(turn.role == "tool" and turn.text.startswith("error: ") for turn in turns),
      problem=problem,
      kind=kind,
      prompt_tokens=sum(len(trace.prompt) for trace in played.traces),
      computed_tokens=sum(trace.computed for trace in played.traces),
      columns=outcome.get("columns", {}),
      metrics=outcome.get("metrics", {}),
    )

  def _turns(
    self, branch: Branch, traces: Sequence[Trace], *, shows_prompt: bool = False
  ) -> tuple[Turn, ...]:
    """Splits a branch into turns, without rewards.

    Args:
      branch: The tokens after the prompt of the group.
      traces: All calls of the rollout.
      shows_prompt: Whether prompt tokens at the start of the branch become turns, too.
    """
    turns: list[Turn] = []
    before = -1  # the index of the call that wrote the latest policy turn
    for start, end in _spans(branch.calls):
      call = branch.calls[start]
      text = self._run.tokenizer.decode(list(branch.tokens[start:end]))
      if call >= 0:
        turns.append(Turn(POLICY, text, start, end, fields=_fields(traces[call])))
        before = call
      elif shows_prompt or before >= 0:
        # The answer to the last messages may be cut off, but its call still tells their roles.
        after = branch.calls[end] if end < len(branch.calls) else branch.next_call
        messages = _messages_between(traces, before, after) or [{"role": OTHERS, "content": text}]
        turns += [turn_of(message, start, end) for message in messages]
    return tuple(turns)

  def _warn(self, turns_PG: np.ndarray, played: Sequence["_Played"]) -> None:
    """Warns of failures and of calls in no branch.

    Raises:
      RunFailed: No call can be learned from, neither of these completions nor of earlier ones.
    """
    problems = [one.problem for one in turns_PG.ravel() if one.problem]
    if problems:
      print(f"warning: the harness failed {len(problems)} times: {problems[0]}", file=sys.stderr)
    left_out = sum(one.left_out for one in played)
    if left_out:
      print(
        f"warning: {left_out} calls of the harness are not learned from: they are in further"
        " branches than environment.branches counts",
        file=sys.stderr,
      )
    self._has_learned |= any(one.own for one in turns_PG.ravel())
    if not self._has_learned:
      raise RunFailed(
        "no call of the harness can be learned from: let it ask the policy at its base_url, with a"
        " prompt of at most data.max_prompt_tokens + sampling.max_tokens tokens"
      )

  def _warn_of_prompts(
    self, turns_PG: np.ndarray, played: Mapping[tuple[int, int], "_Played"], prompts: HarnessPrompts
  ) -> None:
    """Warns, once for each cause, that prompts are too long, or differ within a group."""
    S, lost = self._run.config.data.max_prompt_tokens, 0
    longest, worst = 0, (0, 0)  # worst: (length of a prompt, length of its group's shared prompt)
    for (p, g), one in played.items():
      shared = int(prompts.lengths_P[p])
      for branch in one.branches:
        # Longer prompts count as S tokens here, because the first warning is about their rest.
        longest = max(longest, branch.asked)
        worst = max(worst, (min(branch.asked, S), shared), key=lambda pair: pair[0] - pair[1])
      lost += turns_PG[p, g].lost_tokens
    if longest > S:
      self._warn_once(
        f"the first calls of the harness have prompts of up to {longest} tokens, and"
        f" data.max_prompt_tokens is {S}: the rest counts as tokens of completions, of which"
        " sampling.max_tokens fit",
        "long",
      )
    if lost and worst[0] > worst[1]:
      self._warn_once(
        f"the first calls of a group's completions have {worst[1]} tokens in common at their"
        f" beginning, where one has {worst[0]}: the rest counts as tokens of completions, of which"
        f" sampling.max_tokens fit, and {lost} tokens of the policy did not; let all calls of a"
        " group begin with the same text (harness/lost_tokens counts them in each step)",
        "differ",
      )

  def _warn_once(self, text: str, name: str) -> None:
    if name not in self._warned:
      self._warned.add(name)
      print(f"warning: {text}", file=sys.stderr)


class _Played(NamedTuple):
  """The calls and the result of a harness for one completion.

  Attributes:
    traces: The calls to the policy, in order.
    branches: The branches to learn from.
    outcome: The outcome of the request, as `Players` returns it.
    left_out: How many calls are in none of these branches.
  """

  traces: list[Trace]
  branches: list[Branch]
  outcome: dict[str, Any]
  left_out: int


def _name(endpoint: Endpoint, p: int, g: int) -> str:
  """The name of the conversation of completion [p, g] of this batch."""
  return endpoint.recorder.named(f"{p}/{g}")


def _spans(calls: Sequence[int]) -> list[tuple[int, int]]:
  """Returns (start, end) of each maximal span of equal values in `Branch.calls`."""
  ends = [i for i in range(1, len(calls)) if calls[i] != calls[i - 1]]
  starts = [0, *ends] if calls else []
  return [*zip(starts, [*ends, len(calls)])]


def _fields(trace: Trace) -> dict[str, Any] | None:
  """Returns the fields `content` and `tool_calls` of a policy turn. None without tool calls."""
  if not trace.calls:
    return None
  return {"content": trace.said, "tool_calls": list(trace.calls)}


def _messages_between(traces: Sequence[Trace], before: int, after: int) -> list[dict[str, Any]]:
  """Returns the messages between two calls. [] if the later one continues no known conversation.

  Args:
    traces: All calls of the rollout.
    before: The index of the earlier call. -1 means all messages of the later call.
    after: The index of the later call. -1 if there is none.
  """
  messages = traces[after].messages if after >= 0 else None
  if messages is None:
    return []
  start = 0  # the index of the first message after the earlier call and its answer
  calls: list[dict[str, Any]] = []
  if before >= 0:
    earlier = traces[before].messages
    if earlier is None or list(messages[: len(earlier)]) != list(earlier):
      return []
    start = len(earlier) + 1
    calls = messages[start - 1].get("tool_calls") or []
  found = with_names(calls, messages[start:])
  # With the role of the policy, a message that the program wrote would count as a policy turn.
  return [] if any(one["role"] == POLICY for one in found) else found
