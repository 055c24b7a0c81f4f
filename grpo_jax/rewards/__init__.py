"""Reward functions: they score the completions that the policy wrote.

`reward.functions` in the config names them. A name is one of `REWARDS`, a function of a file as
`path/file.py:function`, or a reward model: its folder, or its name on huggingface.co. A program
that calls `grpo_jax.train` adds its own functions to `REWARDS` with `grpo_jax.register_reward`.

A reward function is called with keyword arguments only, each a list with one entry for each of N
completions:

  completions     the texts that the policy wrote, without special tokens
  prompts         the texts that the policy read. With data.chat: the whole conversation as the chat
                  template rendered it, special tokens included
  completion_ids  the token ids of the completions
  messages        only with data.chat: the conversations that the prompts were rendered from, each
                  a list of {"role": ..., "content": ...}
  question, solution, answer, ...
                  every field of the examples that the prompts were made from

A function names the arguments that it reads and takes the others as `**columns`. The prompts and
completions are always texts. (For a conversational data set, TRL passes lists of messages.)

On several hosts, each process calls the functions with the completions of its own prompts: whole
groups, but not the whole batch.

Each function gets its own copies, so it may change them. What it raises ends the run with one line,
after the last finished step is saved. That includes sys.exit.

The function returns a list of N entries. An entry is one of three:

  a number        the score of the completion. It must be finite. NaN means None.
  None            the function does not score this completion, as in TRL
  a list of steps `(end, number)`, for process supervision: `end` counts the characters of the
                  completion up to and including the last one of the step. The score of the
                  completion is the mean of the numbers, or None for an empty list.

For example, a function that prefers short completions:

  def brevity(completions, **columns):
    return [-len(text) / 100 for text in completions]
"""

from grpo_jax.rewards.call import RewardError, check_arguments
from grpo_jax.rewards.functions import (
  REWARDS,
  Reward,
  Steps,
  name_of,
  resolve,
  resolve_all,
)
from grpo_jax.rewards.score import score

__all__ = [
  "REWARDS",
  "Reward",
  "RewardError",
  "Steps",
  "check_arguments",
  "name_of",
  "resolve",
  "resolve_all",
  "score",
]
