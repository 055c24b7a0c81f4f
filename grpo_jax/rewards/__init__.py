"""Reward functions: they score the completions that the policy wrote.

`reward.functions` in the config names them. A name is one of `REWARDS`, a function or object as
`path/file.py:function` or `package.module:function`, or a reward model: its folder, or its name on
huggingface.co. A program that calls `grpo_jax.train` adds its own functions to `REWARDS` with
`grpo_jax.register_reward`.

A reward function is called with keyword arguments only. Most are lists with one entry for each of N
completions:

  completions     the texts that the policy wrote, without special tokens
  prompts         the texts that the policy read. With data.chat: the whole conversation as the chat
                  template rendered it, special tokens included. A function that reads messages gets
                  messages for both: see below
  completion_ids  the token ids of the completions
  messages        only with data.chat: the conversations that the prompts were rendered from, each
                  a list of {"role": ..., "content": ...}
  turns           only with an environment: the messages of each completion, of the policy and of
                  the environment, each {"role": ..., "content": ...}. Those of turns with calls of
                  tools have `tool_calls`, and those of tools `name` and `tool_call_id`, as OpenAI
                  has them, but for arguments, which are dicts. `completions` has the policy's last
                  turn
  turn_rewards    only with an environment: the rewards of the policy's turns, None for a turn
                  without one. Empty for a completion in which the environment failed
  question, solution, answer, ...
                  every field of the examples that the prompts were made from

The others are (a field of the examples with such a name, or named self, is hidden):

  step            the number of the step, as in metrics.jsonl
  log_metric      log_metric(name, value): the row of metrics has the mean over all calls of the
                  step. In evaluation it is not written. The name must be none of the run's own.
  log_extra       log_extra(column, values): one value for each completion. The files in
                  completions/ have it as `extra/COLUMN`.

A function names the arguments that it reads and takes the others as `**columns`. Without
`**columns` it must name all but the fields of the examples, of which it gets those that it names.
Its signature is checked before a run starts.

The function returns a list of N entries. An entry is one of three:

  a number        the score of the completion. Its size is at most 1e15, so that float32 holds the
                  variance of a group. NaN means None.
  None            the function does not score this completion, as in TRL
  a list of steps `(end, number)`, for process supervision: `end` counts the characters of the
                  completion up to and including the last one of the step. The score of the
                  completion is the mean of the numbers, or None for an empty list.

`grpo_jax/rewards/names.py` lists the functions of this package, which lie in
`grpo_jax/rewards/functions/`. A function may have parameters, as in `cosine(max_length=512)`: see
`grpo_jax/rewards/options.py`.

For example, a function that prefers short completions:

  def brevity(completions, **columns):
    return [-len(text) / 100 for text in completions]

**Which answer it reads.** `answer_of`, an attribute of the function, gets the same arguments and
returns the answer that the function reads in each completion, None for none. maj@k counts these.
Two are equal if `same_answer(first, second)` says so, or without this attribute by ==. Without
`answer_of` there is no maj@k.

**Messages, as in TRL.** With data.chat, a function may read messages instead of texts:

  def accuracy(completions, answer, **columns):
    texts = [completion[0]["content"] for completion in completions]
    return [float(text.endswith(gold)) for text, gold in zip(texts, answer)]

It then gets each completion as `[{"role": "assistant", "content": TEXT}]`, or as all its turns, and
each prompt as its list of messages. To see what a function of yours reads, the run calls it with
made-up messages before it starts, in a fork, so that it remembers nothing of that. A function that
reads a field of one gets messages, whatever it returns or raises. So does one that ends without
that, and raises a TypeError or an AttributeError for texts: another process may have read the
messages. All others get texts, as the functions of this package do. A line at the start says which
function gets which. After `accuracy.conversational = True` or `= False`, no such call is made.

An `async def` works, too. Its calls for different prompts run side by side: up to 64 in one worker,
then in the next one. They share the event loop of their worker.

**Where it is called.** `reward.workers` worker processes call functions, each time with the
completions of one prompt. A call may take `reward.timeout` seconds, and a worker may have
`reward.memory` GiB. One that hangs, or ends in whatever way, is killed with what it started. Each
completion of the call is then scored again, in a call and a worker of its own. If this call fails,
too, the completion has no reward. A sys.exit counts as such an end. An object with state has it in
each worker, and loses it with the worker. What a function prints goes to stderr. JAX computes on
the CPU there.

A function that is marked `in_process`, a reward model, and with `reward.workers=0` every function
is called in the process of the run: with all completions that the process scores, and without
limits. `grpo_jax/rewards/marks.py` lists the marks.

Each call gets its own copies, so it may change them. What else it raises ends the run with one
line, after the last finished step is saved. With `reward.on_error="none"` the run goes on: each
completion of the call is scored again alone, and has no reward if the function raises again. The
metrics `rewards/NAME/errors`, `/timeouts` and `/crashes` count the completions that have no reward
for one of these reasons.

On several hosts, each process scores the completions of its own prompts: whole groups, but not the
whole batch.
"""

from grpo_jax.rewards.answer import Answer, RewardError, Steps, scores_of
from grpo_jax.rewards.call import check_arguments, needed_by
from grpo_jax.rewards.dispatch import Caller
from grpo_jax.rewards.names import REWARDS, Reward, name_of, resolve, resolve_all
from grpo_jax.rewards.workers.pool import Pool

__all__ = [
  "REWARDS",
  "Answer",
  "Caller",
  "Pool",
  "Reward",
  "RewardError",
  "Steps",
  "check_arguments",
  "name_of",
  "needed_by",
  "resolve",
  "resolve_all",
  "scores_of",
]
