"""Attention of groups, whose completions share their prompt, in interchangeable implementations.

Each has a function `attend`, which `view.AttendGroups` describes. `dense` is quadratic in memory.
The others are linear. `softmax` defines attention for `dense`, `chunked` and the cache.

The folder may import the config and the layers of the decoder.
"""

from grpo_jax.model.attention.choose import ATTENTION, choose, implementation
from grpo_jax.model.attention.groups import (
  Groups,
  after_prompts,
  attention_of,
  in_groups,
  recur_in_groups,
)
from grpo_jax.model.attention.packing import Packing, make_packing, move, pack, unpack
from grpo_jax.model.attention.sent import exchanges_in_words
from grpo_jax.model.attention.view import View

__all__ = [
  "ATTENTION",
  "Groups",
  "Packing",
  "View",
  "after_prompts",
  "attention_of",
  "choose",
  "exchanges_in_words",
  "implementation",
  "in_groups",
  "make_packing",
  "move",
  "pack",
  "recur_in_groups",
  "unpack",
]
