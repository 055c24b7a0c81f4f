"""A penalty for completions that come close to the length limit."""

import numpy as np


def overlong(lengths: np.ndarray, max_tokens: int, margin: int) -> np.ndarray:
  """The soft overlong punishment of DAPO (arXiv 2503.14476, equation 13).

  It is 0 up to max_tokens - margin tokens. From there it falls linearly to -1 at max_tokens, and it
  stays at -1 beyond.

  Worked with max_tokens 20480 and margin 4096: 16384 -> 0, 17408 -> -0.25, 18432 -> -0.5,
  20481 -> -1.

  Args:
    lengths: Completion lengths in tokens, an array of any shape. The token that ends a completion
      counts.
    max_tokens: The length limit.
    margin: The number of tokens before the limit in which the penalty grows.

  Returns:
    float32, of the shape of `lengths`.
  """
  tokens_left = max_tokens - margin - np.asarray(lengths)
  return np.clip(tokens_left / margin, -1, 0).astype(np.float32)
