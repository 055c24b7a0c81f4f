"""The structs that cross rooms, and the legend of the shapes in names.

P prompts · G group · S prompt tokens · T completion tokens · V vocabulary · D model · F feed-forward · L layers ·
H query heads · K kv heads · R = H / K · E head dim · B rows (P * G, group-major) · C cache slots.

One alignment: `logprobs_PGT[..., t]` is the log-prob of completion token t given all before it. Prompts and completions
are right-padded. A completion includes the token that stopped it.
"""
from typing import Any

import jax
from flax import struct


@struct.dataclass
class Completions:
  """What the sampler returns. At padding, tokens are 0 and log-probs 0."""
  tokens_PGT: jax.Array  # int32
  lengths_PG: jax.Array  # int32, tokens sampled, the stopping one included
  logprobs_PGT: jax.Array  # float32, of softmax(logits / temperature): what the learner recomputes
  sampling_logprobs_PGT: jax.Array  # float32, of the filtered distribution the token was drawn from
  stopped_by_PG: jax.Array  # int32, the stop id that ended the row; -1 = cut off at T tokens


@struct.dataclass
class Batch:
  """What one update learns from. Log-probs as in `Completions`."""
  prompts_PS: jax.Array  # int32
  prompt_lengths_P: jax.Array  # int32
  completions_PGT: jax.Array  # int32
  mask_PGT: jax.Array  # float32, 1 on tokens the policy sampled
  advantages_PG: jax.Array  # float32
  sampler_logprobs_PGT: jax.Array  # float32, the sampler's `logprobs_PGT`
  ref_logprobs_PGT: jax.Array | None = None  # float32, of the frozen reference; None where no KL asks for it


@struct.dataclass
class TrainState:
  """All that an update changes."""
  step: jax.Array  # int32 scalar, updates done (skipped ones count)
  params: Any
  opt_state: Any
