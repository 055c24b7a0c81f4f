"""Tools and reward functions of an agent, as they are written for TRL.

The reward functions read every field that TRL gives: tool_calls, names, arguments, roles, contents.
"""

import re

ANSWERS = [  # what the policy writes, turn by turn
  ['CALL{"name": "find", "arguments": {"text": "a", "most": 2}}END', "It is *yes*."],
  [
    'Hm.\nCALL{"name": "find", "arguments": {"text": "an", "most": 1}}END\n'
    'CALL{"name": "nothing", "arguments": {"x": 1}}END',
    "It is *no*.",
  ],
  [
    'CALL{"name": "find", "arguments": {"text": "b", "most": -1}}END',
    'CALL{"name": "find", "arguments": {"text": "b", "most": 3}}END',
    "*yes*",
  ],
  ["No call. *yes*"],
  ["It may be yes."],
  ['CALL{"name": "later", "arguments": {"x": 4}}END', "done"],
  ['CALL{"name": "find", "arguments": {"text": "a", "wrong": 2}}END', "*no*"],
  [
    '<think>\nI call.\n</think>\n\nCALL{"name": "later", "arguments": {"x": 3}}END',
    "<think>\nI know.\n</think>\n\nIt is *yes*.",
  ],
]


def written(answer: str) -> str:
  """Returns an answer with the marks of a call as Hermes and Qwen write them."""
  return answer.replace("CALL", "<tool_call>\n").replace("END", "\n</tool_call>")


def find(text: str, most: int) -> list:
  """Finds words.

  Args:
    text: What is in the words.
    most: How many words are given.
  """
  if most < 0:
    raise ValueError("most is negative")
  return [word for word in ("ant", "bee", "banana") if text in word][:most]


async def later(x: int) -> int:
  """Doubles a number.

  Args:
    x: The number.
  """
  return 2 * x


def searches(completions, **_):
  """Pays for searches with arguments, and takes it back for wrong ones."""
  scores = []
  for completion in completions:
    calls = [call for turn in completion for call in turn.get("tool_calls") or []]
    given = [call["function"]["arguments"] for call in calls if call["type"] == "function"]
    wrong = [turn for turn in completion if turn["role"] == "tool" and "error" in turn["content"]]
    scores.append(sum(len(one.get("text", "")) for one in given) - 0.5 * len(wrong))
  return scores


def order(completions, **_):
  """Pays for a call, its answer, and something said."""
  scores = []
  for completion in completions:
    calls = [turn for turn in completion if turn["role"] == "assistant" and turn.get("tool_calls")]
    answers = [turn["name"] for turn in completion if turn.get("role") == "tool"]
    said = [turn for turn in completion if turn["role"] == "assistant" and turn["content"].strip()]
    scores.append(0.1 * bool(calls and answers) + 0.01 * len(calls) + 0.001 * bool(said))
  return scores


def right(completions, answer, **_):
  """Pays for the last message's answer between asterisks."""
  found = [re.search(r"\*(yes|no)\*", completion[-1]["content"]) for completion in completions]
  pairs = zip(found, answer, strict=True)
  return [-0.5 if one is None else float(one[1] == gold) for one, gold in pairs]


def found_words(completions, **_):
  """Pays for the words that the tools found. The tool returned them as a list."""
  tools = [[turn["content"] for turn in one if turn["role"] == "tool"] for one in completions]
  return [float(sum(len(words) for words in one if isinstance(words, list))) for one in tools]


REWARDS = [searches, order, right, found_words]
for reward in REWARDS:
  reward.conversational = True
