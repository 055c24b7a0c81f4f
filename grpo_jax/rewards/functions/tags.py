"""Rewards for the form of a completion: its tags, or a pattern that it matches."""

import re
from typing import Any

from grpo_jax.rewards.marks import checked_by, in_process
from grpo_jax.settings import ConfigError, shown


@in_process
def think_format(completions: list[str], *, opened: bool = False, **columns: Any) -> list[float]:
  """1.0 if the completion reasons once between <think> and </think>, and then goes on, else 0.0.

  It must begin with <think>, hold no other <think>, and hold </think>, as in TRL's
  `think_format_reward`.

  Args:
    completions: The texts.
    opened: The prompt ends in <think>, as the chat templates of some models write it. The
      completion then holds no <think>.
    columns: Not read.
  """
  if opened:
    return [float("</think>" in text and "<think>" not in text) for text in completions]
  return [
    float(text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text)
    for text in completions
  ]


@in_process
def tag_count(completions: list[str], **columns: Any) -> list[float]:
  r"""0.25 for each of four tags that occurs exactly once.

  They are "<think>\n", "\n</think>\n", "\n<answer>\n" and "\n</answer>", as in Open-R1's
  `tag_count_reward`. It leads to the form that `regex` may then demand.
  """
  marks = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
  return [sum(0.25 for mark in marks if text.count(mark) == 1) for text in completions]


def _check_pattern(where: str, options: dict[str, Any]) -> None:
  if not options["pattern"]:
    raise ConfigError(f"{where} needs a pattern, as in regex(pattern=r'<think>.*</think>.*')")
  try:
    re.compile(options["pattern"], re.DOTALL)
  except (re.error, OverflowError, RecursionError) as error:
    raise ConfigError(
      f"{where}(pattern={shown(options['pattern'])}): it is no regular expression: {error}"
    ) from None


@checked_by(_check_pattern)
def regex(completions: list[str], *, pattern: str = "", **columns: Any) -> list[float]:
  r"""1.0 if the whole completion matches a regular expression, else 0.0.

  For example, the form of DeepSeek-R1 (arXiv 2501.12948, section 2.2.2):
  `regex(pattern=r'<think>.*?</think>\s*<answer>.*?</answer>\s*')`.

  The time is that of Python's `re`, which can be exponential in the length of the text.

  Args:
    completions: The texts.
    pattern: The expression, as of `re.fullmatch`. A dot matches a line break too.
    columns: Not read.
  """
  matches = re.compile(pattern, re.DOTALL).fullmatch
  return [float(matches(text) is not None) for text in completions]
