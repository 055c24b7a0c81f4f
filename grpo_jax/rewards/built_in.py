"""The built-in reward functions that a config can name, beside those of `answers`.

Those that are marked `in_process` take time that is linear in the length of the text, for any text
and any parameters. The others run patterns, packages or programs that can take long, or wait for a
server, so workers call them.
"""

from collections.abc import Callable
from typing import Any

from grpo_jax.rewards import (
  choice,
  code,
  countdown,
  judge,
  lengths,
  reasoning,
  repetition,
  schema,
  tags,
)

BUILT_IN: dict[str, Callable[..., Any]] = {
  "choice": choice.choice,
  "code": code.code,
  "cosine": lengths.cosine,
  "countdown": countdown.countdown,
  "json_schema": schema.json_schema,
  "judge": judge.judge,
  "reasoning_accuracy": reasoning.reasoning_accuracy,
  "regex": tags.regex,
  "repetition": repetition.repetition,
  "soft_overlong": lengths.soft_overlong,
  "tag_count": tags.tag_count,
  "think_format": tags.think_format,
}
