"""The completions that a page shows: groups of some saved steps, with their tokens."""

from collections.abc import Callable, Sequence
import dataclasses
import json
import re
from typing import Any

from grpo_jax.around.reporting.columns import finite
from grpo_jax.around.reporting.runs import ShownRun
from grpo_jax.data.tasks import tasks
from grpo_jax.data.tokenizers import tokenizer
from grpo_jax.rewards import plugins
from grpo_jax.settings import ConfigError
from grpo_jax.storage.reading import read_completions

MOST_GROUPS = 8  # of a step
MOST_MEMBERS = 16  # of a group
MOST_TOKENS = 2000  # of a completion; what follows is left out
MOST_IMAGES = 16  # of a prompt
MOST_EXTRAS, MOST_EXTRA = 16, 300  # columns of log_extra, and characters of each
_EXTRA = "extra/"
_THUMBNAIL = re.compile(r"data:image/jpeg;base64,[A-Za-z0-9+/=]{1,20000}")
_CHARACTERS_OF_A_TOKEN = 4
_CONTEXT = 6  # preceding tokens that are decoded with a token, because they can change its text
_MOST_OF_A_CHARACTER = 4  # tokens of a character, which has up to 4 bytes in UTF-8

Decode = Callable[[list[int]], str]


@dataclasses.dataclass(frozen=True)
class Share:
  """How much of each run a page shows.

  Attributes:
    steps: How many steps of each run, evenly spread over the saved steps.
    tokens: The most tokens of each step. The first group of a step is always shown.
  """

  steps: int
  tokens: int


def shares(runs: int) -> Share:
  """How much a page of `runs` runs shows of each, so that all completions take about 6 MB."""
  steps = min(12, max(3, 48 // runs))
  return Share(steps, 400_000 // (steps * runs))


def shown_completions(run: ShownRun, share: Share) -> dict[str, Any]:
  """Selects the completions of a run that the page shows, as a dict for JSON.

  Returns:
    `name`: the run's name. `steps`: a dict for each shown step, with its number (`step`) and its
    `groups`, those with nonzero advantages first. `remarks`: texts about what is left out.
  """
  steps = evenly(run.completion_steps, share.steps)
  remarks = []
  if len(steps) < len(run.completion_steps):
    remarks.append(f"{len(steps)} of {len(run.completion_steps)} saved steps")
  decode, problem = _decoder(run) if steps else (None, "")
  if problem:
    remarks.append(problem)
  shown = []
  for step in steps:
    try:
      rows = [_Completion.of(row) for row in read_completions(run.folder, step)]
    except ConfigError as error:
      remarks.append(str(error))
      continue
    if None in rows:
      remarks.append(f"step {step} without {rows.count(None)} rows that are not completions")
    groups = sorted(_groups(rows, run.config.batch.group_size), key=_is_dead)
    fitting = _fitting(groups[:MOST_GROUPS], share.tokens)
    if len(groups) > len(fitting):
      remark = f"{len(fitting)} of {len(groups)} groups of a step, those with advantages first"
      remarks += [remark] if remark not in remarks else []
    for_json = [_group(rows_of_group, decode) for rows_of_group in fitting]
    shown += [{"step": step, "groups": for_json}] if for_json else []
  return {"name": run.name, "steps": shown, "remarks": remarks}


def evenly(items: Sequence[int], most: int) -> list[int]:
  """Picks at most `most` evenly spaced items, among them the first and the last one."""
  if len(items) <= most:
    return list(items)
  last = len(items) - 1
  return [items[round(i * last / (most - 1))] for i in range(most)]


def token_texts(ids: Sequence[int], decode: Decode) -> list[str]:
  """Returns the text that each token adds to the text of the tokens before it.

  If several tokens encode one character, the last of them has the character and the others "".
  """
  texts: list[str] = []
  before: list[int] = []
  unfinished: list[int] = []
  for token in ids:
    unfinished.append(token)
    # Decoded after other tokens, because a tokenizer may drop a space at the start of a text.
    start, text = decode(before), decode([*before, *unfinished])
    # A token may change the text before it. Then it is decoded alone.
    added = text[len(start) :] if text.startswith(start) else decode(unfinished)
    # Tokenizers decode the bytes of an incomplete character to U+FFFD.
    if added.endswith("\ufffd") and len(unfinished) < _MOST_OF_A_CHARACTER:
      texts.append("")
      continue
    texts.append(added)
    before, unfinished = [*before, *unfinished][-_CONTEXT:], []
  return texts


@dataclasses.dataclass(frozen=True)
class _Completion:
  """A row of a file in completions/, checked field by field: another program may have written it.

  Attributes:
    prompt: The prompt as text.
    text: The completion as text.
    numbers: By column: reward, advantage, length and each rewards/NAME. None where unknown.
    ids: The token ids of the completion. Empty if the row lacks valid ids or log-probs.
    logprobs: The log-prob of each token, None where unknown.
    turns: role, start, end and reward of each turn. Empty if the row has no valid turns or tokens.
    images: The images of the prompt: the source of each, and its thumbnail as a data URL or "".
    extras: Columns from log_extra or from a harness, as texts of at most MOST_EXTRA characters.
  """

  prompt: str
  text: str
  numbers: dict[str, float | None]
  ids: list[int]
  logprobs: list[float | None]
  turns: list[dict[str, Any]]
  images: list[dict[str, str]]
  extras: dict[str, str]

  @classmethod
  def of(cls, row: Any) -> "_Completion | None":
    """Reads a row. Returns None if its prompt or completion is not a text."""
    if not isinstance(row, dict):
      return None
    prompt, text = row.get("prompt"), row.get("completion")
    if not isinstance(prompt, str) or not isinstance(text, str):
      return None
    ids, logprobs = row.get("completion_ids"), row.get("logprobs")
    # A tokenizer would raise OverflowError for an id that does not fit into 32 bits.
    has_tokens = (
      isinstance(ids, list)
      and isinstance(logprobs, list)
      and len(ids) == len(logprobs)
      and all(type(token) is int and 0 <= token < 2**31 for token in ids)
    )
    names = ["reward", "advantage", "length", *(key for key in row if key.startswith("rewards/"))]
    return cls(
      prompt=prompt,
      text=text,
      numbers={name: finite(row.get(name)) for name in names},
      ids=ids if has_tokens else [],
      logprobs=[finite(value) for value in logprobs] if has_tokens else [],
      turns=_turns(row.get("turns")) if has_tokens else [],
      images=_images(row.get("images")),
      extras=_extras(row),
    )

  @property
  def size(self) -> int:
    """Roughly how many tokens the completion takes on a page."""
    return min(MOST_TOKENS, len(self.ids) or len(self.text) // _CHARACTERS_OF_A_TOKEN + 1)


def _turns(values: Any) -> list[dict[str, Any]]:
  """Reads the turns of a row. Returns [] if any of them is not in the format of grpo_jax."""
  if not isinstance(values, list) or not all(isinstance(turn, dict) for turn in values):
    return []
  are_valid = all(
    isinstance(turn.get("role"), str) and type(turn.get("start")) is type(turn.get("end")) is int
    for turn in values
  )
  names = ("role", "start", "end")
  return [
    {name: turn[name] for name in names} | {"reward": finite(turn.get("reward"))}
    for turn in (values if are_valid else [])
  ]


def _images(values: Any) -> list[dict[str, str]]:
  """Reads the first images of a row. Skips entries that are not in the format of grpo_jax."""
  found = values[:MOST_IMAGES] if isinstance(values, list) else []
  images = []
  for one in found:
    if isinstance(one, dict) and isinstance(one.get("source"), str):
      url = str(one.get("thumbnail"))
      picture = url if _THUMBNAIL.fullmatch(url) else ""
      images.append({"source": str(one["source"]), "thumbnail": picture})
  return images


def _extras(row: dict[str, Any]) -> dict[str, str]:
  """The first MOST_EXTRAS columns extra/NAME of a row that have a value, as short texts by NAME."""
  found = {key: value for key, value in row.items() if key.startswith(_EXTRA) and value is not None}
  return {key.removeprefix(_EXTRA): _shown(found[key]) for key in [*found][:MOST_EXTRAS]}


def _shown(value: Any) -> str:
  text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
  return f"{text[:MOST_EXTRA]}…" if len(text) > MOST_EXTRA else text


_Group = list[_Completion]


def _groups(rows: Sequence[_Completion | None], size: int) -> list[_Group]:
  """Splits the rows of a step into groups of `size`. Drops rows that are None and empty groups."""
  groups = [rows[start : start + size] for start in range(0, len(rows), size)]
  return [found for found in ([row for row in one if row] for one in groups) if found]


def _fitting(groups: Sequence[_Group], most_tokens: int) -> list[_Group]:
  """The leading groups that have at most `most_tokens` tokens together, but at least one group."""
  fitting: list[_Group] = []
  for rows in groups:
    most_tokens -= sum(row.size for row in rows[:MOST_MEMBERS])
    if fitting and most_tokens < 0:
      break
    fitting.append(rows)
  return fitting


def _is_dead(rows: _Group) -> bool:
  """Whether the policy learns nothing from a group: no advantage is known and nonzero."""
  return not any(row.numbers["advantage"] for row in rows)


def _group(rows: _Group, decode: Decode | None) -> dict[str, Any]:
  """A group as a dict for JSON. `left_out` is how many completions exceed MOST_MEMBERS."""
  return {
    "prompt": rows[0].prompt,
    "images": rows[0].images,
    "left_out": max(0, len(rows) - MOST_MEMBERS),
    "members": [_member(row, decode) for row in rows[:MOST_MEMBERS]],
  }


def _member(row: _Completion, decode: Decode | None) -> dict[str, Any]:
  """A completion as a dict for JSON: with tokens and log-probs if they are known, else as text."""
  scores = {name: row.numbers[name] for name in row.numbers if name.startswith("rewards/")}
  member: dict[str, Any] = {
    **{name: row.numbers[name] for name in ("reward", "advantage", "length")},
    "scores": {name.removeprefix("rewards/"): value for name, value in scores.items()},
    **({"extras": row.extras} if row.extras else {}),
  }
  if decode is None or not row.ids:
    return member | {"text": row.text[: MOST_TOKENS * _CHARACTERS_OF_A_TOKEN]}
  logprobs = [None if value is None else round(value, 3) for value in row.logprobs[:MOST_TOKENS]]
  turns = {"turns": row.turns} if row.turns else {}
  tokens = token_texts(row.ids[:MOST_TOKENS], decode)
  return member | {"tokens": tokens, "logprobs": logprobs, **turns}


def _decoder(run: ShownRun) -> tuple[Decode | None, str]:
  """Returns a function that decodes the run's tokens and "", or None and why there is none."""
  config = run.config
  path = config.data.tokenizer or config.model.path
  try:
    if path:
      return tokenizer.load(path).decode, ""
    plugins.load(config.plugins)  # one of them may register the task
    task = tasks.make_task(config.data)
    alphabet = tasks.characters(config.data, task, config.has_other_texts)
    return tokenizer.characters(alphabet).decode, ""
  except (ConfigError, OSError) as error:
    return None, f"completions without tokens, because their tokenizer cannot be read: {error}"
