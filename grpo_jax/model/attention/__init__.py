"""Attention of groups, whose completions share their prompt, in interchangeable implementations.

Each computes `attend(q_PNHE, k_PNKE, v_PNKE, prompt_lengths_P, view)` as `view.Attend` describes
it. `dense` is quadratic in memory. The others are linear.
"""

from grpo_jax.model.attention.choose import ATTENTION, choose
from grpo_jax.model.attention.groups import Groups, attention_of, in_groups
from grpo_jax.model.attention.packing import Packing, make_packing, move, pack, unpack
from grpo_jax.model.attention.view import Attend, View

__all__ = [
  "ATTENTION",
  "Attend",
  "Groups",
  "Packing",
  "View",
  "attention_of",
  "choose",
  "in_groups",
  "make_packing",
  "move",
  "pack",
  "unpack",
]
