"""The completions of a page: those of some steps, with their tokens."""

from collections.abc import Callable, Sequence
from typing import Any

from grpo_jax.data.tasks import tasks
from grpo_jax.data.tokenizers import tokenizer
from grpo_jax.reporting.runs import ShownRun
from grpo_jax.settings import ConfigError
from grpo_jax.storage.reading import read_completions

MOST_STEPS = 12  # of a run, over its whole length
MOST_GROUPS = 8  # of a step
MOST_MEMBERS = 16  # of a group
MOST_TOKENS = 2000  # of a completion; what follows is left out
_CONTEXT = 6  # tokens before one that decide how it is written
_MOST_OF_A_CHARACTER = 4  # tokens: the bytes of UTF-8

Decode = Callable[[list[int]], str]


def shown_completions(run: ShownRun) -> dict[str, Any]:
  """What the page holds of a run's completions, as JSON has it.

  Returns:
    `name`; `steps`: for each step its number and its groups; `remarks`: what is left out.
  """
  steps = evenly(run.completion_steps, MOST_STEPS)
  remarks = []
  if len(steps) < len(run.completion_steps):
    remarks.append(f"{len(steps)} of {len(run.completion_steps)} saved steps")
  decode, problem = _decoder(run) if steps else (None, "")
  if problem:
    remarks.append(problem)
  shown = []
  for step in steps:
    try:
      rows = read_completions(run.folder, step)
    except ConfigError as error:
      remarks.append(str(error))
      continue
    groups = _groups(rows, run.config.batch.group_size)
    if len(groups) > MOST_GROUPS:
      remark = f"{MOST_GROUPS} of {len(groups)} groups of a step, those with advantages first"
      remarks += [remark] if remark not in remarks else []
    groups.sort(key=_is_dead)
    made = [_group(rows_of_group, decode) for rows_of_group in groups[:MOST_GROUPS]]
    shown.append({"step": step, "groups": made})
  return {"name": run.name, "steps": shown, "remarks": remarks}


def evenly(items: Sequence[int], most: int) -> list[int]:
  """At most `most` of the items, evenly, with the first and the last."""
  if len(items) <= most:
    return list(items)
  last = len(items) - 1
  return [items[round(i * last / (most - 1))] for i in range(most)]


def token_texts(ids: Sequence[int], decode: Decode) -> list[str]:
  """The text that each token adds to those before it.

  A character of several tokens is the text of the last of them. The others have "".
  """
  texts: list[str] = []
  before: list[int] = []
  unfinished: list[int] = []
  for token in ids:
    unfinished.append(token)
    known, whole = decode(before), decode([*before, *unfinished])
    added = whole[len(known) :] if whole.startswith(known) else decode(unfinished)
    if added.endswith("\ufffd") and len(unfinished) < _MOST_OF_A_CHARACTER:
      texts.append("")
      continue
    texts.append(added)
    before, unfinished = [*before, *unfinished][-_CONTEXT:], []
  return texts


def _groups(rows: Sequence[dict[str, Any]], size: int) -> list[list[dict[str, Any]]]:
  return [list(rows[start : start + size]) for start in range(0, len(rows), size)]


def _is_dead(rows: Sequence[dict[str, Any]]) -> bool:
  """Whether nothing is learned from the group."""
  return not any(row.get("advantage") for row in rows)


def _group(rows: Sequence[dict[str, Any]], decode: Decode | None) -> dict[str, Any]:
  return {
    "prompt": rows[0]["prompt"],
    "left_out": max(0, len(rows) - MOST_MEMBERS),
    "members": [_member(row, decode) for row in rows[:MOST_MEMBERS]],
  }


def _member(row: dict[str, Any], decode: Decode | None) -> dict[str, Any]:
  member = {
    "reward": row.get("reward"),
    "advantage": row.get("advantage"),
    "length": row.get("length"),
    "scores": {key.removeprefix("rewards/"): row[key] for key in row if key.startswith("rewards/")},
    "text": row["completion"],
  }
  ids, logprobs = row.get("completion_ids"), row.get("logprobs")
  if decode is not None and ids and logprobs:
    member["tokens"] = token_texts(ids[:MOST_TOKENS], decode)
    member["logprobs"] = [round(value, 3) for value in logprobs[:MOST_TOKENS]]
  return member


def _decoder(run: ShownRun) -> tuple[Decode | None, str]:
  """What decodes the run's tokens, or None and the reason."""
  config = run.config
  path = config.data.tokenizer or config.model.path
  try:
    if path:
      return tokenizer.load(path).decode, ""
    task = tasks.make_task(config.data)
    return tokenizer.characters(tasks.characters(config.data, task)).decode, ""
  except (ConfigError, OSError) as error:
    return None, f"completions without tokens, because their tokenizer cannot be read: {error}"
