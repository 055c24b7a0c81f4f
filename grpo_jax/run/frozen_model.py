"""Models that no update changes: reward models and teachers."""

from collections.abc import Collection
import functools
from pathlib import Path
from typing import Any

from flax.traverse_util import flatten_dict
import jax
from jax.sharding import Mesh

from grpo_jax import model
from grpo_jax.parallel import sharding


def load_frozen(
  folder: Path, config: model.ModelConfig, mesh: Mesh, labels: Collection[int] = (0,)
) -> Any:
  """The parameters in a Hugging Face folder, in their places on the mesh.

  No update changes them, so their matrices need no float32 copy: they are kept in `config.dtype`.
  Norm scales stay float32, because they are multiplied in float32.

  Args:
    folder: The folder.
    config: The shape of its model.
    mesh: The devices.
    labels: The heads that the model may have, as for `model.load`.

  Raises:
    ConfigError: The folder is incomplete or damaged.
  """
  abstract = jax.eval_shape(functools.partial(model.init, config=config), jax.random.key(0))
  places = flatten_dict(sharding.param_specs(abstract, mesh), sep="/")
  convert = functools.partial(model.quantised, dtype=config.dtype)
  return model.load(folder, places, convert, labels)[1]
