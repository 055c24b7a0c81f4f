"""Reward functions: they score the completions that the policy wrote.

`reward.functions` in the config names them. A name is one of `REWARDS`, a function or object as
`path/file.py:function` or `package.module:function`, or a reward model: its folder, or its name on
huggingface.co. A program that calls `grpo_jax.train` adds its own functions to `REWARDS` with
`grpo_jax.register_reward`.

A reward function is called with keyword arguments only. Most arguments are lists with one entry for
each of N completions:

  completions     the texts that the policy wrote, without special tokens
  prompts         the texts that the policy read. With data.chat: the whole conversation as the chat
                  template rendered it, special tokens included. A function that reads messages gets
                  prompts and completions as messages: see below
  completion_ids  the token ids of the completions
  messages        only with data.chat: the conversations that the prompts were rendered from, each
                  a list of {"role": ..., "content": ...}
  turns           only with an environment: the messages of each completion, by the policy and by
                  the environment, each {"role": ..., "content": ...}. A turn that calls tools also
                  has `tool_calls`, and a tool message has `name` and `tool_call_id`, in OpenAI's
                  format, except that the arguments are dicts. If a tool returned a list, `content`
                  is this list. `completions` then has the policy's last turn
  turn_rewards    only with an environment: for each completion, the rewards of the policy's turns,
                  None for a turn without a reward. Empty if the environment failed
  question, solution, answer, ...
                  every field of the examples that the prompts were made from

The other arguments hide fields of the examples with the same names. A field `self` is hidden, too.

  step            the number of the step, as in metrics.jsonl
  log_metric      log_metric(name, value): metrics.jsonl gets the mean over all calls of the step.
                  Evaluation does not write it. The name must not be one that the run itself uses.
  log_extra       log_extra(column, values): one value for each completion. The files in
                  completions/ have a column `extra/COLUMN` with them.

A function names the arguments that it reads and collects the others in `**columns`. Without
`**columns` it must name every argument, except for fields of the examples, which it may omit.
The signature is checked before a run starts.

The function returns a list of N entries. Each entry is one of these:

  a number        the score of the completion. The absolute value is at most 1e15, so that the
                  variance of a group fits in float32. NaN means None.
  None            the function does not score this completion, as in TRL
  a list of steps `(end, number)`, for process supervision: `end` is the number of characters from
                  the start of the completion to the end of the step. The score of the completion
                  is the mean of the numbers, or None for an empty list.

`grpo_jax/rewards/names.py` lists the functions of this package, which are defined in
`grpo_jax/rewards/functions/`. A function may have parameters, as in `cosine(max_length=512)`: see
`grpo_jax/rewards/options.py`.

For example, a function that prefers short completions:

  def brevity(completions, **columns):
    return [-len(text) / 100 for text in completions]

**Answers, for maj@k.** The attribute `answer_of` of a reward function is a function that gets the
same arguments. It returns the answer that each completion gives, or None for no answer. maj@k
counts these answers. The attribute `same_answer(first, second)` tells whether two answers are
equal. Without it they are compared with ==. Without `answer_of` there is no maj@k.

**Messages, as in TRL.** With data.chat, a function may read messages instead of texts:

  def accuracy(completions, answer, **columns):
    texts = [completion[0]["content"] for completion in completions]
    return [float(text.endswith(gold)) for text, gold in zip(texts, answer)]

Each completion is then `[{"role": "assistant", "content": TEXT}]`, or the list of all its turns,
and each prompt is a list of messages. To find out what your function reads, the run calls it with
made-up messages before training, in a fork, so that the function keeps no trace of the call. A
function that reads a field of a message gets messages, whatever it returns or raises. If it returns
without reading one, another process may have read the messages. It is then called with texts, and
gets messages if it raises a TypeError or an AttributeError. All other functions get texts, as the
functions of this package do. A line at the start says what each function gets. After
`accuracy.conversational = True` or `= False`, no such call is made.

A function may be an `async def`. Its calls for different prompts run concurrently: up to 64 in one
worker, then in the next one. All calls in a worker share an event loop.

**Workers.** `reward.workers` worker processes call the functions, with the completions of one
prompt per call. A call may take `reward.timeout` seconds, and a worker may use `reward.memory` GiB.
If a call hangs, or the worker ends for any reason, sys.exit included, the worker and all processes
that it started are killed. Each completion of the call is then scored again, in a separate call and
a new worker. If that call fails, too, the completion has no reward. Each worker has a separate copy
of an object's state, which is lost when the worker ends. Prints go to stderr. JAX runs on the CPU
in workers.

The process of the run itself calls reward models, functions that are marked `in_process`, and, with
`reward.workers=0`, every function. Such a call gets all completions that the process scores, and
has no limits. `grpo_jax/rewards/marks.py` lists the marks.

A function may change its arguments, which are copies. Any other exception ends the run with a
one-line message, after the last finished step is saved. With `reward.on_error="none"` the run
continues: each completion of the call is scored again alone, and has no reward if the function
raises again. The metrics `rewards/NAME/errors`, `/timeouts` and `/crashes` count the completions
that have no reward for these reasons.

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
