"""Checks whether `FORMATS` can parse the calls that a chat template tells a model to write."""

import json
import os
import re

from grpo_jax.data.tokenizers.replies import call_turn
from grpo_jax.data.tokenizers.tokenizer import Tokenizer
from grpo_jax.environments.tool_calls import FORMATS, Call, family_of
from grpo_jax.settings import ConfigError

# The question and the call that `are_read` renders. Their odd words occur in no template.
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
  """Returns whether this package can parse the tool calls that a chat template asks for.

  It renders a call as the template writes calls of earlier turns, and parses it. True also if that
  cannot be tested, and for a template that ignores tools: then the user's own prompt must describe
  the tools and the format of calls.
  """
  try:
    prompt, without = tokenizer.render([_ASKED], tools=[_TOOL]), tokenizer.render([_ASKED])
  except ConfigError:
    return True  # the template refuses this conversation, so nothing can be tested
  if prompt == without:  # the template ignores tools
    return True
  family = family_of(tokenizer.template)
  if not family:
    return False
  written, form = _call_of(tokenizer, prompt), FORMATS[family]
  if _ARGUMENTS["zq7text"] not in written:
    return True  # the template drops calls of earlier turns, so its known family must be enough
  try:
    ids = tokenizer.encode_batch_after([written])[0]
  except ConfigError:
    return True  # the vocabulary cannot encode the call, which is another problem
  # The template may write more after the call than a model does, which ends at a stop id.
  end = next((i for i, token in enumerate(ids) if token in tokenizer.stop_ids), len(ids))
  text = tokenizer.decode(ids[:end], tokenizer.skipped(form.marks))
  if form.parse(text, [_TOOL]).calls == [Call(_NAME, json.dumps(_ARGUMENTS))]:
    return True
  # Some templates write earlier calls in another format than the one that they ask for.
  return family == "hermes" and _TOLD_HERMES.search(prompt) is not None


def _call_of(tokenizer: Tokenizer, prompt: str) -> str:
  """Renders a call after the conversation `prompt`, without `prompt`. "" if that is refused."""
  for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS)):  # DeepSeek's templates expect a text
    try:
      whole = tokenizer.render([_ASKED, call_turn([(_NAME, arguments)])], False, [_TOOL])
    except ConfigError:
      continue
    same = os.path.commonprefix([prompt, whole])
    # Cut at a boundary, not within a tag: <think> and <tool_call> both begin with <t.
    return whole[max(same.rfind(end) for end in ">]\n") + 1 :]
  return ""
