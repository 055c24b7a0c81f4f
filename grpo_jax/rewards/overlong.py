"""A penalty for completions that come near the limit of length."""

import numpy as np


def overlong(lengths: np.ndarray, max_tokens: int, margin: int) -> np.ndarray:
  """0 up to max_tokens - margin tokens, from there down to -1 at max_tokens and beyond (DAPO 2503.14476, eq. 13).

  float32, of lengths of any shape, the end token counted. Worked, 20480 and 4096: 16384 -> 0, 17408 -> -.25,
  18432 -> -.5, 20481 -> -1.
  """
  return np.clip((max_tokens - margin - np.asarray(lengths)) / margin, -1, 0).astype(np.float32)
