"""The terms on which a learner and its sampler processes must agree to draw the same completions.

Devices, how sampling is spread over them, and the folders of models may differ.
"""

import hashlib
from typing import Any

import jax

from grpo_jax.config import to_dict
from grpo_jax.parallel.sharding import leaf_path
from grpo_jax.run.run import Run
from grpo_jax.settings import shown
from grpo_jax.storage.saved_config import as_json, flat

_SECTIONS = ("model.", "lora.", "sampling.", "batch.group_size", "batch.prompts", "seed")
_OF_DEVICES = ("context", "prompt_piece", "rows", "tensor")  # how a sampler uses its own devices
_MAY_DIFFER = ("model.path", "lora.path", *(f"sampling.{key}" for key in _OF_DEVICES))
_MOST_IDS = 4096  # token ids whose texts are compared
_VERSION = 2  # the version of the messages


def abstract_weights(run: Run) -> Any:
  """Shapes, dtypes and shardings of the weights that `Parameters.for_sampling` returns."""
  parameters = run.parameters
  return parameters.sampling.abstract(parameters.abstract_policy)


def terms_of(run: Run) -> dict[str, Any]:
  """The terms of this side, as JSON values by name. The learner compares both sides' terms."""
  settings = flat(as_json(to_dict(run.config)))
  # The names are written for the user, because a refusal begins with the name that differs.
  terms = {
    f"config key {key}": value
    for key, value in settings.items()
    if key.startswith(_SECTIONS) and key not in _MAY_DIFFER
  }
  shape, tokenizer = run.parameters.model, run.tokenizer
  leaves = jax.tree_util.tree_leaves_with_path(abstract_weights(run))
  texts = [tokenizer.decode([token]) for token in range(min(tokenizer.vocab_size, _MOST_IDS))]
  return terms | {
    "the version of the messages": _VERSION,
    "the version of jax": jax.__version__,
    "the model's stop ids": list(shape.stop_ids),
    "the tokenizer's hash": _hash([tokenizer.vocab_size, texts]),
    "the hash of the weights' shapes (which are others on CPUs than on accelerators)": _hash(
      [(leaf_path(path), x.shape, str(x.dtype)) for path, x in leaves]
    ),
  }


def difference(ours: dict[str, Any], theirs: Any) -> str:
  """Describes the first term of a sampler (`theirs`) that differs. "" if all agree."""
  if not isinstance(theirs, dict):
    return "it did not say what it would sample with"
  for name in [*ours, *theirs]:
    if name not in ours or name not in theirs or ours[name] != theirs[name]:
      here, there = (shown(terms.get(name, "missing")) for terms in (ours, theirs))
      return f"{name if name in ours else shown(name)} is {there}, and the learner has {here}"
  return ""


def _hash(values: Any) -> str:
  return hashlib.sha256(repr(values).encode()).hexdigest()[:16]
