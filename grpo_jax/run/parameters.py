"""A run's parameters: where they come from and how they lie; with adapters, those that are trained and those under them."""

import dataclasses
import functools
from typing import Any, Callable

import jax
from flax.traverse_util import flatten_dict

from grpo_jax import model
from grpo_jax.config import Config
from grpo_jax.parallel import sharding
from grpo_jax.settings import ConfigError

Progress = Callable[[int, int], None]  # (bytes of a checkpoint read, of how many)


class Parameters:
  """Built from a config and the shape of its model.

  Attributes: `model`, that shape on the mesh; `abstract`, shapes and shardings of what is trained: all parameters, or the
  adapters; `abstract_base`, of the frozen ones under these, or None. Raises ConfigError for adapters that do not fit.
  """

  def __init__(
    self, config: Config, shape: model.ModelConfig, mesh: jax.sharding.Mesh, progress: Progress
  ):
    self._config, self._mesh, self._progress = config, mesh, progress
    self.model = dataclasses.replace(
      shape, lora=_lora(config), **sharding.model_shardings(shape, mesh)
    )
    whole = self._placed(
      jax.eval_shape(functools.partial(model.init, config=self.model), jax.random.key(0))
    )
    self._count = sum(x.size for x in jax.tree.leaves(whole))
    self._places = flatten_dict(
      jax.tree.map(lambda x: x.sharding, whole), sep="/"
    )  # of a checkpoint's tensors
    if self.model.lora and shape.num_experts and config.lora.base_dtype in model.QUANTISED:
      raise ConfigError(
        f"config key lora.base_dtype is {config.lora.base_dtype!r}: experts, most of a mixture's weights, are"
        " not quantised here; choose 'bfloat16'"
      )
    self.abstract, self.abstract_base = whole, None
    if self.model.lora is not None:
      self.abstract_base = self._placed(jax.eval_shape(self._frozen, whole))
      init = functools.partial(model.init_adapters, config=self.model, base=whole)
      self.abstract = self._placed(jax.eval_shape(init, jax.random.key(0)))

  def describe(self) -> str:
    """How many there are."""
    adapters = f"{sum(x.size for x in jax.tree.leaves(self.abstract)):,} parameters in adapters on "
    return f"{adapters * bool(self.model.lora)}{self._count:,} {'frozen ones' if self.model.lora else 'parameters'}"

  @property
  def abstract_policy(self) -> Any:
    """Shapes and shardings of all that the policy is computed from."""
    return (
      self.abstract if self.model.lora is None else model.join(self.abstract_base, self.abstract)
    )

  def initial(self, key: jax.Array) -> Any:
    """What is trained, before the first update: the checkpoint's parameters or random ones; or adapters that change
    nothing, or those of lora.path."""
    init, shardings = model.init, jax.tree.map(lambda x: x.sharding, self.abstract)
    if self._config.lora.path:
      put = lambda x, place: jax.make_array_from_callback(x.shape, place, lambda i: x[i])
      return jax.tree.map(put, model.load_adapters(self._config.lora.path, self.model), shardings)
    if self.model.lora is not None:
      init = functools.partial(model.init_adapters, base=self.abstract_base)
    elif self._config.model.path:
      return self._loaded(lambda name, x: x.astype("float32"), self.abstract)
    return jax.jit(functools.partial(init, config=self.model), out_shardings=shardings)(key)

  @functools.cached_property
  def base(self) -> Any:
    """The frozen parameters under the adapters, in lora.base_dtype; None without adapters."""
    if self.model.lora is None:
      return None
    return self._loaded(
      functools.partial(model.quantised, dtype=self._config.lora.base_dtype), self.abstract_base
    )

  def _loaded(self, convert, abstract):
    """The checkpoint's parameters, as `convert` makes them, where `abstract` has them."""
    places = flatten_dict(jax.tree.map(lambda x: x.sharding, abstract), sep="/")
    placed = lambda name, x: jax.lax.with_sharding_constraint(convert(name, x), places[name])
    return model.load(self._config.model.path, self._places, placed, progress=self._progress)[1]

  def policy(self, trained: Any) -> Any:
    """All that the policy is computed from: `trained`, on top of the frozen parameters where it is adapters."""
    return trained if self.model.lora is None else model.join(self.base, trained)

  def for_sampling(self, trained: Any) -> Any:
    """The policy's parameters in sampling.dtype and sampling.layout. Frozen ones are converted once."""
    trained = self._converted(trained)
    return trained if self.model.lora is None else model.join(self._sampled_base, trained)

  @functools.cached_property
  def _sampled_base(self):
    return self._converted(self.base)

  def _converted(self, params):
    sampling = self._config.sampling
    same = all(x.dtype == self.sampled_dtype(x) for x in jax.tree.leaves(params))
    return params if sampling.layout == "train" and same else self._convert(params)

  @functools.cached_property
  def _convert(self):
    def convert(params):
      params = jax.tree.map(lambda x: x.astype(self.sampled_dtype(x)), params)
      places = sharding.param_specs(params, self._mesh, self._config.sampling.layout)
      return jax.lax.with_sharding_constraint(params, places)

    return jax.jit(convert)

  def sampled_dtype(self, x: Any) -> Any:
    """In which a parameter is sampled from. Norm scales stay float32, as the learner multiplies with them; what is quantised
    stays so."""
    dtype = self._config.sampling.dtype
    return dtype if dtype and x.ndim > 1 and x.dtype in ("float32", "bfloat16") else x.dtype

  def _frozen(self, params):
    quantised = lambda path, x: model.quantised(
      sharding.leaf_path(path), x, self._config.lora.base_dtype
    )
    return jax.tree_util.tree_map_with_path(quantised, params)

  def _placed(self, abstract):
    specs = sharding.param_specs(abstract, self._mesh)
    return jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, specs
    )


def _lora(config: Config) -> model.Lora | None:
  c = config.lora
  if not c.rank:
    return None
  targets = tuple(sorted({name.removesuffix("_proj") for name in c.targets}))
  asked = model.Lora(c.rank, c.alpha, c.rslora, targets)
  if c.path:
    for key, value in dataclasses.asdict(model.load_lora(c.path)).items():
      if value != getattr(asked, key):
        value = tuple(f"{name}_proj" for name in value) if key == "targets" else value
        raise ConfigError(
          f"config key lora.{key} is {getattr(c, key)!r}: the adapters of {c.path} have {value!r}, set it to"
          " that"
        )
  return asked
