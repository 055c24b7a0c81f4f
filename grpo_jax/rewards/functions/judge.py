"""A reward that a language model gives, behind an address that speaks OpenAI's chat completions.

vLLM, SGLang, llama.cpp and OpenAI's own service answer such requests.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
import os
from pathlib import Path
import re
import threading
import time
from typing import Annotated, Any
import urllib.parse

from grpo_jax.rewards.answer import RewardError
from grpo_jax.rewards.functions.judge_client import Client, JudgeError, Request
from grpo_jax.rewards.marks import checked_by
from grpo_jax.settings import ConfigError, above, at_least

PROMPT = """Judge an answer to a question.

Question:
{question}

Correct answer:
{answer}

Answer to judge:
{completion}

Is the answer to judge right? End with one line: Score: 1 if it is, Score: 0 if it is not."""

_FIELD = re.compile(r"\{(\w+)\}")


def _check_options(where: str, options: dict[str, Any]) -> None:
  parts = urllib.parse.urlsplit(options["url"])
  if parts.scheme not in ("http", "https") or not parts.hostname:
    raise ConfigError(
      f"{where}(url={options['url']!r}): give the address of the judge, as in"
      " judge(url='http://localhost:8000/v1', model='NAME')"
    )
  if not options["model"]:
    raise ConfigError(f"{where}(model=''): give the judge's name at that address")
  if options["lowest"] >= options["highest"]:
    raise ConfigError(f"{where}(lowest={options['lowest']}): it must be less than highest")
  try:
    groups = re.compile(options["pattern"]).groups
  except (re.error, OverflowError, RecursionError) as error:
    raise ConfigError(f"{where}(pattern={options['pattern']!r}): {error}") from None
  if not groups:
    raise ConfigError(f"{where}(pattern={options['pattern']!r}): it needs a group, as (\\d+)")
  _template(options["prompt_file"], where)


@checked_by(_check_options)
def judge(
  completions: list[str],
  log_metric: Any = None,
  *,
  url: str = "",
  model: str = "",
  prompt_file: str = "",
  pattern: str = r"Score:\s*\**\s*(-?\d+(?:\.\d+)?)",
  lowest: float = 0.0,
  highest: float = 1.0,
  max_tokens: Annotated[int, at_least(1)] = 512,
  at_once: Annotated[int, at_least(1, at_most=1024)] = 16,
  attempts: Annotated[int, at_least(1, at_most=20)] = 3,
  seconds: Annotated[float, above(0)] = 20.0,
  key_variable: str = "OPENAI_API_KEY",
  cache: str = "",
  **columns: Any,
) -> list[float | None]:
  """The number in a judge's reply, clipped to [lowest, highest].

  The judge gets `PROMPT`, or the text of prompt_file, with the completion and any columns of the
  data set in braces. What a policy writes is part of that prompt, so it can address the judge:
  compare with a checker that cannot be talked to. The same prompt is asked once.

  Args:
    completions: The texts.
    log_metric: Gets judge/failed, the number of completions without a score.
    url: The address up to and including /v1, such as http://localhost:8000/v1.
    model: The name of the judge there.
    prompt_file: A file with the prompt. It must hold {completion}.
    pattern: A regular expression whose first group is the score. The last match counts.
    lowest: The least reward.
    highest: The greatest reward.
    max_tokens: The longest reply.
    at_once: How many requests are under way at once.
    attempts: How often a request is tried, with growing pauses between, or as the server says.
    seconds: The time limit for all requests of a call; reward.timeout should be longer.
    key_variable: The environment variable with the key of the service, if it needs one.
    cache: A folder that keeps replies for later runs. '' = they are kept in memory only.
    columns: The fields of the prompt.

  Returns:
    The scores. None where the judge gave none in time. Raises RewardError if it gave none at all.
  """
  template = _template(prompt_file, "reward judge")
  prompts = [_fill(template, text, columns, i) for i, text in enumerate(completions)]
  client = _client(url, os.environ.get(key_variable, ""), cache)
  deadline = time.monotonic() + seconds

  def score(prompt: str) -> float | JudgeError:
    try:
      reply = client.reply(Request(model, prompt, max_tokens), attempts, deadline)
      return min(highest, max(lowest, _number(reply, pattern)))
    except JudgeError as error:
      return error

  return _scores(prompts, score, at_once, url, log_metric)


def _scores(
  prompts: list[str],
  score: Callable[[str], float | JudgeError],
  at_once: int,
  url: str,
  log_metric: Any,
) -> list[float | None]:
  """The score of each prompt. None where there is none, but not everywhere."""
  different = list(dict.fromkeys(prompts))
  with ThreadPoolExecutor(at_once) as pool:
    scores = dict(zip(different, pool.map(score, different)))
  failures = [one for one in scores.values() if isinstance(one, JudgeError)]
  if different and len(failures) == len(different):
    raise RewardError(f"the judge at {url} gave no score: {failures[0]}")
  values = [scores[prompt] for prompt in prompts]
  rewards = [None if isinstance(value, JudgeError) else value for value in values]
  if log_metric is not None:
    log_metric("judge/failed", rewards.count(None))
  return rewards


def _number(reply: str, pattern: str) -> float:
  """The score in a reply."""
  found = None
  for match in re.finditer(pattern, reply):
    found = match[1]
  try:
    return float(found)
  except (TypeError, ValueError):
    raise JudgeError(f"its reply has no score: {' '.join(reply.split())[-100:]!r}") from None


def _fill(template: str, completion: str, columns: dict[str, Any], row: int) -> str:
  """The template with its fields filled in once, so that braces in a completion stay."""

  def value(match: re.Match[str]) -> str:
    if match[1] == "completion":
      return completion
    if match[1] not in columns:
      raise ConfigError(f"reward judge: the prompt has {match[0]}, and the data set no such column")
    return str(columns[match[1]][row])

  return _FIELD.sub(value, template)


def _template(file: str, where: str) -> str:
  if not file:
    return PROMPT
  try:
    text = Path(file).expanduser().read_text(encoding="utf-8")
  except (OSError, ValueError, RuntimeError) as error:
    raise ConfigError(f"{where}(prompt_file={file!r}): it cannot be read: {error}") from None
  if "{completion}" not in text:
    raise ConfigError(f"{where}(prompt_file={file!r}): it must hold {{completion}}")
  return text


_clients: dict[tuple[str, str, str], Client] = {}
_clients_lock = threading.Lock()


def _client(url: str, key: str, cache: str) -> Client:
  with _clients_lock:
    return _clients.setdefault((url, key, cache), Client(url, key, cache))
