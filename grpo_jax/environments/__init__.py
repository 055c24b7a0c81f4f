"""Environments answer the policy within a completion.

A completion with an environment is a conversation. The policy writes a turn, the environment
answers, and the policy writes again, until the environment says that it is done or a limit is
reached. The policy reads the environment's tokens. The loss excludes them.

**Tools** are functions that the policy calls. `environment.tools` names them: one of `TOOLS`,
`path/file.py:function`, or `package.module:function`. A tool is a typed function with a Google
docstring, of which the chat template shows a JSON schema to the model:

  def calculator(expression: str) -> str:
    \"\"\"Computes an arithmetic expression.

    Args:
      expression: Such as 3 * (4 + 5).
    \"\"\"

An `async def` works, too. The value that it returns becomes the tool's message: a text as it is,
other values as JSON. Reward functions get a list as a list. An exception becomes a message that
begins with "error: ".

**An environment** is a class. `environment.name` names it: one of `ENVIRONMENTS`,
`path/file.py:Class`, `package.module:Class`, `textarena:ID` or `openenv:ADDRESS`. Each completion
has its own object:

  class Riddle:

    def reset(self, example):
      return [{"role": "user", "content": "Guess a number from 1 to 9."}]

    def step(self, message):
      return [{"role": "user", "content": "No."}], 0.0, False

`reset` gets the fields of the example. It returns the messages that follow the prompt of the data
set, or [] if there are none. All completions of a prompt share these messages, so they must depend
on the example alone. `step` gets the policy's turn, as {"role": "assistant", "content": TEXT}. It
returns the messages that answer the turn, the reward of this turn, which is a finite number or
None, and whether the conversation has ended, True or False. Both may be `async def`.

Workers call both, under reward.timeout and reward.memory. Between two turns the object is pickled,
so that any worker can continue with it. An object of a class with `pickles = False` stays in one
worker.

The reward function `environment` returns the sum of a completion's rewards. If a turn calls tools,
the tools answer it, and `step` is not called for this turn.
"""

from grpo_jax.environments.acting import Outcome, Request
from grpo_jax.environments.configured import Environments, make_environments
from grpo_jax.environments.names import ENVIRONMENTS, TOOLS, register_environment, register_tool
from grpo_jax.environments.workers import Runner

__all__ = [
  "ENVIRONMENTS",
  "TOOLS",
  "Environments",
  "Outcome",
  "Request",
  "Runner",
  "make_environments",
  "register_environment",
  "register_tool",
]
