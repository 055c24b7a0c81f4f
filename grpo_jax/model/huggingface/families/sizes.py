"""The lengths of the axes of tensors."""

import math

from grpo_jax.model.config import ModelConfig


def sizes(config: ModelConfig) -> dict[str, int]:
  """The length of each axis letter that `TensorSpec` uses.

  The decoder's capital letters mean the same as in types.py, and those of the vision tower do not.
  The sizes of parts that a model lacks, such as experts, are 0 or left out.
  """
  found = {
    "V": config.vocab_size,
    "D": config.embed_dim,
    "H": config.num_heads,
    "K": config.num_kv_heads,
    "E": config.head_dim,
    "g": 2 * config.head_dim,  # a query and its gate
    "F": config.mlp_dim,
    "X": config.num_experts,
    "M": config.expert_dim,
    "s": config.shared_dim,  # hidden units of the MLP beside the experts
    "N": config.labels,
  }
  found |= {  # in place of E, K and F in layers that differ from the others
    "e": config.global_head_dim or config.head_dim,
    "h": config.global_kv_heads or config.num_kv_heads,
    "f": 2 * config.mlp_dim,  # with `wide_borrowers`
  }
  if config.per_layer_dim:
    found |= {"p": config.per_layer_dim, "l": config.num_layers * config.per_layer_dim}
  if config.delta:
    delta = config.delta
    found |= {
      "j": delta.key_heads,
      "i": delta.value_heads // delta.key_heads,  # value heads of a key head
      "a": delta.key_dim,
      "b": delta.value_dim,
      "w": delta.width,
    }
  if config.latent:
    latent = config.latent
    found |= {
      "q": latent.query_rank,
      "n": latent.rank,
      "k": latent.rank + latent.rope_dim,  # a latent, and the rotated numbers that heads share
      "u": latent.key_dim + latent.value_dim,  # a head's key and value, computed from the latent
      "v": latent.value_dim,
    }
  if config.vision:
    vision = config.vision
    found |= {
      "W": vision.dim,
      "A": vision.num_heads,
      "B": vision.head_dim,
      "I": vision.mlp_dim,
      "O": vision.merged_dim,
      "o": vision.merged_dim,  # for kernels in which both axes have this length
      "P": vision.positions,
      "C": math.prod(vision.patch),
      "T": 3,  # colours, or queries, keys and values
      "c": 2,  # rows and columns
      # Frames, height and width of a patch (channels, frames, height, width). Shorter patches lack
      # some of them. Then the family's table lacks the letter, and its length here is arbitrary.
      "t": (*vision.patch, 1)[1],
      "y": (1, *vision.patch)[-2],
      "x": vision.patch[-1],
    }
  return found
