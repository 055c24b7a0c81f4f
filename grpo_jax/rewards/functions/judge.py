"""A reward from a language model, behind a server with OpenAI's API for chat completions.

Such servers are vLLM, SGLang, llama.cpp and OpenAI's. It needs the package openai:
pip install -e '.[judge]'.
"""

import asyncio
import dataclasses
import hashlib
import itertools
import json
import os
from pathlib import Path
import random
import re
import secrets
from types import ModuleType
from typing import Annotated, Any
import urllib.parse
import weakref

from grpo_jax.rewards.answer import NoReward
from grpo_jax.rewards.marks import checked_by, one_worker, prepared_by
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
_TRY_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)  # HTTP statuses that are retried
_MOST_IN_MEMORY = 100_000  # the maximum size of `_replies`
_replies: dict[str, str] = {}  # by the hash of the request
# By event loop, because a semaphore belongs to one, then by address and limit: the semaphores that
# limit the concurrent requests of all calls together.
_semaphores: weakref.WeakKeyDictionary[
  asyncio.AbstractEventLoop, dict[tuple[str, int], asyncio.Semaphore]
] = weakref.WeakKeyDictionary()


class JudgeError(Exception):
  """The judge has given no score for a prompt. The text says why, in one line."""


def _openai() -> ModuleType:
  try:
    import openai  # imported here because it is an optional package, and slow to import
  except ImportError:
    raise ConfigError("reward judge needs the package openai: pip install -e '.[judge]'") from None
  return openai


def _prepare() -> None:
  """Imports the modules of a client, so that this does not count against a call's time limit."""
  _ = _openai().AsyncOpenAI(base_url="http://localhost", api_key="none").chat.completions


def _check_options(where: str, options: dict[str, Any]) -> None:
  """Raises ConfigError for options with which no request could succeed."""
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
  _template(options["prompt_file"], where)  # raises ConfigError, as `_openai` does
  _openai()


@one_worker
@prepared_by(_prepare)
@checked_by(_check_options)
async def judge(
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
) -> list[float | NoReward | None]:
  """The number in a judge's reply, clipped to [lowest, highest].

  The judge gets `PROMPT`, or the text of prompt_file, with {completion} and the names of columns in
  braces filled in. A policy can learn to address the judge in its completions: compare the scores
  with a checker that is no language model. Equal prompts are sent once.

  Args:
    completions: The texts.
    log_metric: Logs judge/failed, the number of completions to which the judge gave no score. Rows
      that lack a field of the prompt do not count.
    url: The address up to and including /v1, such as http://localhost:8000/v1.
    model: The name of the judge on the server.
    prompt_file: A file with the prompt, which must contain {completion}.
    pattern: A regular expression whose first group is the score. The last match counts.
    lowest: The lowest reward.
    highest: The highest reward.
    max_tokens: The maximum length of a reply.
    at_once: The maximum number of concurrent requests, over all calls of this process of the run.
    attempts: The maximum number of attempts for a request, with growing delays, or as the server
      asks. An invalid chat completion counts as a failed attempt.
    seconds: The time limit for all requests of a call; reward.timeout should be longer.
    key_variable: The environment variable with the API key, if the server needs one.
    cache: A folder that stores replies for later runs. '' = replies are stored in memory only.
    columns: The fields of the prompt.

  Returns:
    The scores. NoReward for a completion without a score in time. None if a row lacks a field of
    the prompt, for which no request is sent.
  """
  template = _template(prompt_file, "reward judge")
  prompts = [_fill(template, text, columns, i) for i, text in enumerate(completions)]
  client = _Judge(url, model, os.environ.get(key_variable, ""), max_tokens, attempts, cache)
  replies = await client.replies([one for one in prompts if one is not None], at_once, seconds)
  scores = [None if one is None else _score(replies[one], pattern) for one in prompts]
  if log_metric is not None:
    log_metric("judge/failed", sum(isinstance(score, JudgeError) for score in scores))
  return [_reward(score, url, lowest, highest) for score in scores]


def _reward(
  score: float | JudgeError | None, url: str, lowest: float, highest: float
) -> float | NoReward | None:
  if score is None:
    return None
  if isinstance(score, JudgeError):
    return NoReward(f"the judge at {url} gave no score: {score}")
  return min(highest, max(lowest, score))


def _score(reply: str | JudgeError, pattern: str) -> float | JudgeError:
  """Parses the score in a reply. Returns a JudgeError if there is none."""
  if isinstance(reply, JudgeError):
    return reply
  matches = list(re.finditer(pattern, reply))
  try:
    return float(matches[-1][1])
  except (IndexError, TypeError, ValueError):
    return JudgeError(f"its reply has no score: {' '.join(reply.split())[-100:]!r}")


def _fill(template: str, completion: str, columns: dict[str, Any], row: int) -> str | None:
  """Fills in the fields of a template. Braces in a completion are not fields.

  None if a column has no value in this row.
  """
  named = [name for name in _FIELD.findall(template) if name in columns]
  if any(columns[name][row] is None for name in named):
    return None

  def value(match: re.Match[str]) -> str:
    if match[1] == "completion":
      return completion
    if match[1] not in columns:
      raise ConfigError(f"reward judge: the prompt has {match[0]}, and the data set no such column")
    return str(columns[match[1]][row])

  # Characters that a request cannot contain, such as a lone surrogate, become "?".
  return _FIELD.sub(value, template).encode("utf-8", "replace").decode()


def _template(file: str, where: str) -> str:
  if not file:
    return PROMPT
  try:
    text = Path(file).expanduser().read_text(encoding="utf-8-sig")
  except (OSError, ValueError, RuntimeError) as error:
    raise ConfigError(f"{where}(prompt_file={file!r}): it cannot be read: {error}") from None
  if "{completion}" not in text:
    raise ConfigError(f"{where}(prompt_file={file!r}): it must hold {{completion}}")
  return text


@dataclasses.dataclass(frozen=True)
class _Judge:
  """A model on a server, which samples at temperature 0. For most attributes see `judge`.

  Attributes:
    key: The API key, or empty.
  """

  url: str
  model: str
  key: str
  max_tokens: int
  attempts: int
  cache: str

  async def replies(
    self, prompts: list[str], at_once: int, seconds: float
  ) -> dict[str, str | JudgeError]:
    """The reply to each prompt, or a JudgeError without a reply in `seconds`, by prompt."""
    # The client requires a key. It does not retry: `_reply` does, because it knows the deadline.
    client = _openai().AsyncOpenAI(
      base_url=self.url, api_key=self.key or "none", max_retries=0, timeout=None
    )
    # The client reads these from the environment, for OpenAI's server. Others must not get them.
    client.organization = client.project = None
    client._custom_headers = {}
    loop = asyncio.get_running_loop()
    of_loop = _semaphores.setdefault(loop, {})
    request_limit = of_loop.setdefault((self.url, at_once), asyncio.Semaphore(at_once))
    deadline = loop.time() + seconds

    async def reply(prompt: str) -> str | JudgeError:
      try:
        async with asyncio.timeout_at(deadline), request_limit:
          return await self._reply(client, prompt, deadline)
      except TimeoutError:
        return JudgeError("no reply in time")
      except JudgeError as error:
        return error

    different = list(dict.fromkeys(prompts))
    async with client:
      return dict(zip(different, await asyncio.gather(*map(reply, different))))

  async def _reply(self, client: Any, prompt: str, deadline: float) -> str:
    """Returns a stored reply to this prompt, or requests one, with retries.

    Raises:
      JudgeError: The server refused the request, the last attempt failed, or a retry would begin
        after the deadline.
    """
    request = [self.url.rstrip("/") + "/chat/completions", self.model, prompt, self.max_tokens]
    key = hashlib.sha256(json.dumps(request).encode()).hexdigest()
    reply = self._stored(key)
    if reply is not None:
      return reply
    openai = _openai()
    for attempt in itertools.count(1):
      # Random, so that requests that failed together are not all repeated at the same moment.
      pause = 2 ** (attempt - 1) * random.uniform(0.75, 1.25)
      try:
        message = {"role": "user", "content": prompt}
        completion = await client.chat.completions.create(
          model=self.model, messages=[message], max_tokens=self.max_tokens, temperature=0
        )
        reply = completion.choices[0].message.content
        if isinstance(reply, str):
          break
        problem = "its reply has no text"
      except openai.APIStatusError as error:
        problem = f"status {error.status_code} {' '.join(error.response.text.split()):.200}"
        if error.status_code not in _TRY_AGAIN:
          raise JudgeError(problem) from None
        after = error.response.headers.get("Retry-After", "")  # seconds. A date is ignored
        pause = float(after) if re.fullmatch(r"\d+(\.\d+)?", after) else pause
      except openai.APIConnectionError as error:
        problem = _shown(_first_cause(error))
      except Exception as error:  # the client may raise anything for an invalid reply
        problem = f"it sent no chat completion: {_shown(error)}"
      if attempt == self.attempts or asyncio.get_running_loop().time() + pause >= deadline:
        raise JudgeError(f"{problem}, tried {attempt} times")
      await asyncio.sleep(pause)
    self._store(key, reply)
    return reply

  def _stored(self, name: str) -> str | None:
    if name in _replies or not self.cache:
      return _replies.get(name)
    try:
      return self._file(name).read_text(encoding="utf-8")
    except (OSError, ValueError):
      return None

  def _store(self, name: str, reply: str) -> None:
    if len(_replies) < _MOST_IN_MEMORY:
      _replies[name] = reply
    if not self.cache:
      return
    file = self._file(name)
    try:
      file.parent.mkdir(parents=True, exist_ok=True)
      # Written, then renamed, because other processes read and write the same folder.
      part = file.with_suffix(f".{secrets.token_hex(8)}")
      part.write_text(reply, encoding="utf-8", errors="replace")
      part.replace(file)
    except OSError as error:
      raise JudgeError(f"its reply cannot be kept in {file.parent}: {error.strerror}") from None

  def _file(self, name: str) -> Path:
    return Path(self.cache).expanduser() / name[:2] / name


def _first_cause(error: BaseException) -> BaseException:
  """The exception that caused a failed connection, which the client's exception does not name."""
  while error.__cause__ or error.__context__:
    error = error.__cause__ or error.__context__
  return error


def _shown(error: BaseException) -> str:
  return f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
