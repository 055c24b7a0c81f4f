"""The reward functions of the runs in this folder."""


def digits(completions, **_):
  """The fraction of the longest completion that is digits."""
  return [_count(text) / 8 for text in completions]


def even(completions, **_):
  """1 where the number of digits is even. A random policy is right now and then."""
  return [float(_count(text) % 2 == 0) for text in completions]


def _count(text):
  return sum(character.isdigit() for character in text)
