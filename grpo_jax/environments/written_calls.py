"""Checks whether the calls that a chat template tells a model to write can be read here."""

import json
import os
import re

from grpo_jax.data.tokenizers.replies import call_turn
from grpo_jax.data.tokenizers.tokenizer import Tokenizer
from grpo_jax.environments.tool_calls import FORMATS, Call, family_of
from grpo_jax.settings import ConfigError

_ASKED = {"role": "user", "content": "Zq7Question"}
_NAME, _ARGUMENTS = "zq7tool", {"zq7text": "Zq7Value"}
_TOLD_HERMES = re.compile(r"<tool_call>\s*\{")
_TOOL = {
  "type": "function",
  "function": {
    "name": _NAME,
    "description": "Answers.",
    "parameters": {
      "type": "object",
      "properties": {"zq7text": {"type": "string", "description": "A text."}},
      "required": ["zq7text"],
    },
  },
}


def are_read(tokenizer: Tokenizer) -> bool:
  """Whether the calls of tools that a chat template shows are read, and not taken for text.

  True for a template that shows no tools: whoever describes them in the prompt also describes the
  calls.
  """
  try:
    prompt, without = tokenizer.render([_ASKED], tools=[_TOOL]), tokenizer.render([_ASKED])
  except ConfigError:
    return True  # it wants another conversation, so that nothing can be said
  if prompt == without:
    return True
  family = family_of(tokenizer.template)
  if not family:
    return False
  written, form = _call_of(tokenizer, prompt), FORMATS[family]
  if _ARGUMENTS["zq7text"] not in written:
    return True  # it writes no calls of earlier turns, so that its signs must do
  try:
    ids = tokenizer.encode_batch_after([written])[0]
  except ConfigError:
    return True  # a vocabulary that cannot write the call has other problems
  end = next((i for i, token in enumerate(ids) if token in tokenizer.stop_ids), len(ids))
  text = tokenizer.decode(ids[:end], tokenizer.skipped(form.marks))
  if form.parse(text, [_TOOL]).calls == [Call(_NAME, json.dumps(_ARGUMENTS))]:
    return True
  # Some write earlier calls in another way than they tell the model to write its own.
  return family == "hermes" and _TOLD_HERMES.search(prompt) is not None


def _call_of(tokenizer: Tokenizer, prompt: str) -> str:
  """A call as the template writes it, or "" if it cannot."""
  for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS)):  # DeepSeek's templates want a text
    try:
      whole = tokenizer.render([_ASKED, call_turn([(_NAME, arguments)])], False, [_TOOL])
    except ConfigError:
      continue
    same = os.path.commonprefix([prompt, whole])
    # Not in the middle of a mark: <think> and <tool_call> have a beginning in common.
    return whole[max(same.rfind(end) for end in ">]\n") + 1 :]
  return ""
