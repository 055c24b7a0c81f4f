"""Reward functions that do what a completion says, for tests of worker processes."""

import asyncio
import os
from pathlib import Path
import re
import secrets
import signal
import subprocess
import sys
import time

DAEMON = "import os,time; os.setsid() if os.fork() == 0 else os._exit(0); time.sleep(600)"


poisoned = []


def act(word):
  """Does what a completion says. Most of them say nothing."""
  if poisoned:
    raise RuntimeError("poisoned by an earlier call")
  match word:
    case "poison":
      poisoned.append(word)
    case "loop":
      while True:
        pass
    case "regex":
      re.match(r"(a+)+$", "a" * 64 + "b")
    case "power":
      10**10**10
    case "_exit":
      os._exit(0)
    case "_exit3":
      os._exit(3)
    case "exit":
      sys.exit(0)
    case "kill":
      os.kill(os.getpid(), signal.SIGKILL)
    case "stop":
      os.kill(os.getpid(), signal.SIGSTOP)
    case "segv":
      os.kill(os.getpid(), signal.SIGSEGV)
    case "list":
      [0] * (100 * 2**30 // 8)
    case "balloon":
      b"x" * 2**31
    case "garbage":
      for number in range(3, 64):
        try:
          os.write(number, b'{"number": 0}\n]\n')
        except OSError:
          pass
    case "close":
      os.closerange(3, 64)
    case "alarm":
      signal.alarm(1)
    case "daemon":
      subprocess.run([sys.executable, "-c", DAEMON], check=True)
    case "raise":
      raise ValueError("no\nluck")
    case "print":
      print("printed by a function", flush=True)
    case "sleep":
      time.sleep(0.2)


def lengths(completions, **_):
  scores = []
  for text in completions:
    act(text)
    scores.append(None if text == "none" else float(len(text)))
  return scores


def sizes(completions, **_):
  for text in completions:
    act(text)
  return [float(len(completions))] * len(completions)


def ranks(completions, **_):
  return [float(sorted(completions).index(text)) for text in completions if act(text) is None]


ranks.whole_groups = True


def short(completions, **_):
  return [1.0]


def infinite(completions, **_):
  return [float(text) for text in completions]


def logs(completions, step, log_metric, log_extra, **_):
  log_metric("step_seen", step)
  log_metric("letters", sum(map(len, completions)))
  log_extra("upper", [text.upper() for text in completions])
  log_extra("odd", [{1, 2}, float("nan")][: len(completions)])
  return [0.0] * len(completions)


def logs_too_few(completions, log_extra, **_):
  log_extra("one", [1])
  return [0.0] * len(completions)


async def waits(completions, **_):
  for text in completions:
    match text:
      case "forever":
        await asyncio.sleep(600)
      case "blocks":
        time.sleep(600)
      case "raise":
        raise TimeoutError("of the function itself")
  await asyncio.sleep(0.3)
  return [float(len(text)) for text in completions]


def arrive(text):
  """For a text "FOLDER COUNT": leaves a file there. Returns whether all have come."""
  folder, count = text.split()
  Path(folder, secrets.token_hex(8)).touch()
  return lambda: len(os.listdir(folder)) >= int(count)


def meets(completions, **_):
  """Returns when so many completions are being scored at the same time."""
  have_all = [arrive(text) for text in completions]
  while not all(have() for have in have_all):
    time.sleep(0.01)
  return [1.0] * len(completions)


async def meets_async(completions, **_):
  have_all = [arrive(text) for text in completions]
  while not all(have() for have in have_all):
    await asyncio.sleep(0.01)
  return [float(os.getpid())] * len(completions)


class Counts:
  """An object that counts its own calls."""

  def __init__(self):
    self.calls = 0

  def __call__(self, completions, **_):
    self.calls += 1
    return [float(self.calls)] * len(completions)


class Waits:
  async def __call__(self, completions, **_):
    return await waits(completions)


counts, waits_object = Counts(), Waits()


def talks(prompts, completions, **_):
  return [
    float(prompt[0]["content"] == "hi" and completion[0] == {"role": "assistant", "content": "x"})
    for prompt, completion in zip(prompts, completions)
  ]


talks.conversational = True
