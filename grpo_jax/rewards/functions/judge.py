"""A reward that a language model gives, behind an address that speaks OpenAI's chat completions.

vLLM, SGLang, llama.cpp and OpenAI's own service answer such requests. It needs the package openai:
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
_TRY_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)
_MOST_IN_MEMORY = 100_000  # replies
_replies: dict[str, str] = {}  # by the hash of the request
# The semaphores that bound the requests of all calls in an event loop, by address and number.
_places: weakref.WeakKeyDictionary[
  asyncio.AbstractEventLoop, dict[tuple[str, int], asyncio.Semaphore]
] = weakref.WeakKeyDictionary()


class JudgeError(Exception):
  """There is no score for a prompt: why, in one line."""


def _openai() -> ModuleType:
  try:
    import openai  # imported here because it is an optional package, and slow to import
  except ImportError:
    raise ConfigError("reward judge needs the package openai: pip install -e '.[judge]'") from None
  return openai


def _prepare() -> None:
  """Imports the parts of a client. Else the first request does, on the time limit of its call."""
  _ = _openai().AsyncOpenAI(base_url="http://localhost", api_key="none").chat.completions


def _check_options(where: str, options: dict[str, Any]) -> None:
  """Raises ConfigError for options with which the judge could not be asked."""
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
    at_once: How many requests are under way at once, of all calls of this process of the run.
    attempts: How often a request is tried, with growing pauses between, or as the server says. A
      reply that is no chat completion counts as a failure, too.
    seconds: The time limit for all requests of a call; reward.timeout should be longer.
    key_variable: The environment variable with the key of the service, if it needs one.
    cache: A folder that keeps replies for later runs. '' = they are kept in memory only.
    columns: The fields of the prompt.

  Returns:
    The scores. Where the judge gave none in time, the completion has none, and the others keep
    theirs. None where a row lacks a field of the prompt: the judge is not asked.
  """
  template = _template(prompt_file, "reward judge")
  prompts = [_fill(template, text, columns, i) for i, text in enumerate(completions)]
  asked = _Judge(url, model, os.environ.get(key_variable, ""), max_tokens, attempts, cache)
  replies = await asked.replies([one for one in prompts if one is not None], at_once, seconds)
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
  """The score in a reply, or why there is none."""
  if isinstance(reply, JudgeError):
    return reply
  matches = list(re.finditer(pattern, reply))
  try:
    return float(matches[-1][1])
  except (IndexError, TypeError, ValueError):
    return JudgeError(f"its reply has no score: {' '.join(reply.split())[-100:]!r}")


def _fill(template: str, completion: str, columns: dict[str, Any], row: int) -> str | None:
  """The template with its fields filled in once, so that braces in a completion stay.

  None if the row has no value for one of them.
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

  # What no request can hold becomes "?", such as half of a character.
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
  """A model behind an address, which is asked at temperature 0. The arguments are those of `judge`.

  Attributes:
    key: The key of the service, or empty.
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
    """The reply to each prompt, or why there is none after so many seconds."""
    # The client wants some key. `_reply` tries again, because it knows the deadline.
    client = _openai().AsyncOpenAI(
      base_url=self.url, api_key=self.key or "none", max_retries=0, timeout=None
    )
    # Else what it took from the environment for OpenAI's own service would go to this address.
    client.organization = client.project = None
    client._custom_headers = {}
    loop = asyncio.get_running_loop()
    places = _places.setdefault(loop, {})
    free = places.setdefault((self.url, at_once), asyncio.Semaphore(at_once))
    deadline = loop.time() + seconds

    async def reply(prompt: str) -> str | JudgeError:
      try:
        async with asyncio.timeout_at(deadline), free:
          return await self._reply(client, prompt, deadline)
      except TimeoutError:
        return JudgeError("no reply in time")
      except JudgeError as error:
        return error

    different = list(dict.fromkeys(prompts))
    async with client:
      return dict(zip(different, await asyncio.gather(*map(reply, different))))

  async def _reply(self, client: Any, prompt: str, deadline: float) -> str:
    """An earlier reply to this prompt, or a new one. What may be over soon is tried again."""
    request = [self.url.rstrip("/") + "/chat/completions", self.model, prompt, self.max_tokens]
    name = hashlib.sha256(json.dumps(request).encode()).hexdigest()
    reply = self._kept(name)
    if reply is not None:
      return reply
    openai = _openai()
    for attempt in itertools.count(1):
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
        after = error.response.headers.get("Retry-After", "")
        pause = float(after) if re.fullmatch(r"\d+(\.\d+)?", after) else pause
      except openai.APIConnectionError as error:
        problem = _shown(_first_cause(error))
      except Exception as error:  # whatever the client raises for a reply that is none
        problem = f"it sent no chat completion: {_shown(error)}"
      if attempt == self.attempts or asyncio.get_running_loop().time() + pause >= deadline:
        raise JudgeError(f"{problem}, tried {attempt} times")
      await asyncio.sleep(pause)
    self._keep(name, reply)
    return reply

  def _kept(self, name: str) -> str | None:
    if name in _replies or not self.cache:
      return _replies.get(name)
    try:
      return self._file(name).read_text(encoding="utf-8")
    except (OSError, ValueError):
      return None

  def _keep(self, name: str, reply: str) -> None:
    if len(_replies) < _MOST_IN_MEMORY:
      _replies[name] = reply
    if not self.cache:
      return
    file = self._file(name)
    try:
      file.parent.mkdir(parents=True, exist_ok=True)
      # Renamed when it is whole, because other processes read and write the same folder.
      part = file.with_suffix(f".{secrets.token_hex(8)}")
      part.write_text(reply, encoding="utf-8", errors="replace")
      part.replace(file)
    except OSError as error:
      raise JudgeError(f"its reply cannot be kept in {file.parent}: {error.strerror}") from None

  def _file(self, name: str) -> Path:
    return Path(self.cache).expanduser() / name[:2] / name


def _first_cause(error: BaseException) -> BaseException:
  """Why there is no connection, which the client's own exception does not say."""
  while error.__cause__ or error.__context__:
    error = error.__cause__ or error.__context__
  return error


def _shown(error: BaseException) -> str:
  return f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
