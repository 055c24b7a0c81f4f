"""Rewards for the format of a completion: tags, or a pattern that it matches.

The chat templates of some models end a prompt with <think>. A completion then counts as if it began
with this tag.
"""

from collections.abc import Iterator
import re
from typing import Any

from grpo_jax.rewards.marks import checked_by, in_process
from grpo_jax.settings import ConfigError, shown

_LONGEST_END = 100  # characters at the end of a prompt that are searched for <think>
_OPENED = re.compile(r"<think>\s*\Z")


@in_process
def think_format(
  completions: list[str],
  prompts: list[str] | None = None,
  *,
  opened: bool = False,
  **columns: Any,
) -> list[float]:
  """1.0 if the completion has one reasoning block, between <think> and </think>, else 0.0.

  It must begin with <think>, contain no other <think>, and contain </think>, as in TRL's
  `think_format_reward`. If the prompt ends with <think>, the completion must not contain <think>.

  Args:
    completions: The texts.
    prompts: The prompts that the completions continue.
    opened: Whether to assume that all prompts end with <think>.
    columns: Ignored.
  """
  texts = [
    opening + text
    for text, opening in zip(completions, _openings(completions, prompts, opened), strict=True)
  ]
  return [
    float(text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text)
    for text in texts
  ]


def _openings(
  completions: list[str], prompts: list[str] | None, opened: bool = False
) -> Iterator[str]:
  """Yields the end of each prompt that counts as the start of the completion: <think>, or ""."""
  for prompt in prompts or [""] * len(completions):
    found = _OPENED.search(prompt[-_LONGEST_END:])
    yield "<think>" if opened else found[0] if found else ""


@in_process
def tag_count(
  completions: list[str], prompts: list[str] | None = None, **columns: Any
) -> list[float]:
  r"""0.25 for each of four tags that occurs exactly once.

  They are "<think>\n", "\n</think>\n", "\n<answer>\n" and "\n</answer>", as in Open-R1's
  `tag_count_reward`. It is a denser reward for a format that `regex` may require. A "<think>\n" at
  the end of the prompt counts.
  """
  marks = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
  return [
    sum(0.25 for mark in marks if (opening + text).count(mark) == 1)
    for text, opening in zip(completions, _openings(completions, prompts), strict=True)
  ]


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
def regex(
  completions: list[str], prompts: list[str] | None = None, *, pattern: str = "", **columns: Any
) -> list[float]:
  r"""1.0 if the whole completion matches a regular expression, else 0.0.

  For example, the format of DeepSeek-R1 (arXiv 2501.12948, section 2.2.2):
  `regex(pattern=r'<think>.*?</think>\s*<answer>.*?</answer>\s*')`.

  If the prompt ends with <think>, the completion may match with or without it. The time of Python's
  `re` can be exponential in the length of the text.

  Args:
    completions: The texts.
    prompts: The prompts that the completions continue.
    pattern: The expression, for `re.fullmatch`. A dot also matches a line break.
    columns: Ignored.
  """
  matches = re.compile(pattern, re.DOTALL).fullmatch
  return [
    float(any(matches(one) for one in {text, opening + text}))
    for text, opening in zip(completions, _openings(completions, prompts), strict=True)
  ]
