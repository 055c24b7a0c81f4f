"""The parameters of a run: where they come from, and how they are sharded.

Frozen parameters are the `base`. With LoRA, that is the whole checkpoint, and adapters are trained.
Without LoRA, it is a frozen vision tower, and the decoder is trained. If all parameters are
trained, there is no base.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
import dataclasses
import functools
from pathlib import Path
from typing import Any

from flax.traverse_util import flatten_dict
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from grpo_jax import learner, model
from grpo_jax.config import Config
from grpo_jax.learner.optimizer import make_optimizer
from grpo_jax.parallel import sharding
from grpo_jax.parallel.chips import chip_of, memory_of
from grpo_jax.parallel.mesh import mesh_apart, sampling_mesh
from grpo_jax.parallel.sharding import leaf_path
from grpo_jax.run import fitting
from grpo_jax.run.memory import Held
from grpo_jax.sampler.weights import SamplingWeights, matrix_dtype
from grpo_jax.settings import ConfigError
from grpo_jax.types import TrainState

_TOWER = "vision"  # the key of the vision tower in the tree of parameters


class Parameters:
  """The parameters of a run.

  Attributes:
    model: The model's shape, with the adapters and the shardings on the mesh.
    abstract: Shapes and shardings of the trained parameters.
    abstract_base: Shapes and shardings of the frozen base, or None if all parameters are trained.
    abstract_reference: Shapes and shardings of a reference copy of the trained parameters.
    abstract_state: Shapes and shardings of the train state.
    encodes_first: Whether a frozen vision tower encodes images once for sampler and learner, before
      their prompts are sampled. False if the sampler has other devices: it would have to wait.
    held: The arrays that the run holds on one device.
    sampling: How the sampler reads the parameters.
  """

  def __init__(
    self,
    config: Config,
    shape: model.ModelConfig,
    mesh: jax.sharding.Mesh,
    apart: Sequence[jax.Device] = (),
  ):
    """Computes shapes and shardings, and loads nothing. `apart` are the devices that only sample.

    Raises ConfigError for adapters that do not fit the model, or an unknown optimizer.
    """
    self._config = config
    self._mesh = mesh
    shardings = sharding.model_shardings(shape, mesh, splits_tokens=True)
    most = config.sampling.max_tokens
    of_run: dict[str, Any] = {"completion_tokens": most, **shardings}
    if config.environment.harness:
      # The endpoint's prompts hold the earlier turns, and it answers each with a turn (traced.py).
      turn = config.environment.turn_tokens or most
      of_run["text_tokens"] = config.data.max_prompt_tokens + most + turn
    self.model = dataclasses.replace(shape, lora=lora_of(config), **of_run)
    init = functools.partial(model.init, config=self.model)
    all_shapes = self._placed(jax.eval_shape(init, jax.random.key(0)))
    self._count = count(all_shapes)
    self._checkpoint_places = _places(all_shapes)
    self.abstract = all_shapes
    self.abstract_base = None
    self._check_quantisation()
    if self.model.lora is None and self.model.has_frozen_tower:
      self.abstract = {name: part for name, part in all_shapes.items() if name != _TOWER}
      self.abstract_base = {_TOWER: all_shapes[_TOWER]}
    elif self.model.lora is not None:
      self.abstract_base = self._placed(jax.eval_shape(self._base_of, all_shapes))
      adapters = functools.partial(model.init_adapters, config=self.model, base=all_shapes)
      self.abstract = self._placed(jax.eval_shape(adapters, jax.random.key(0)))
      self._check_tower_adapters(all_shapes)
    self.abstract_reference = self._placed(jax.eval_shape(self._reference_of, self.abstract))
    self.abstract_state = self._abstract_state()
    is_elsewhere = bool(apart or config.rollout.listen or config.rollout.engine)
    self.encodes_first = self.model.has_frozen_tower and not is_elsewhere
    self.held = self._held(mesh_apart(mesh, apart) if apart else mesh)
    self.sampling = self.held.weights
    if config.lora.path:  # before the weights are loaded, which takes longer
      model.check_adapters(config.lora.path, self.model)

  @property
  def abstract_policy(self) -> Any:
    """Shapes and shardings of all parameters of the policy."""
    return model.join(self.abstract_base, self.abstract)

  @property
  def has_reference_copy(self) -> bool:
    """Whether the run holds a separate reference.

    False without a KL term, or if the frozen base without adapters is the reference.
    """
    algo = self._config.algo
    return algo.uses_reference and (self.model.lora is None or algo.ref_sync_steps > 0)

  def layers_of(self, name: str) -> list[str]:
    """The names of the layers that a leaf of a checkpoint stacks (see `checkpoint_reader.read`)."""
    return model.layer_names(name, self.model)

  def describe(self) -> str:
    """How many parameters there are, for the header of a run."""
    if self.model.lora is not None:
      return f"{count(self.abstract):,} parameters in adapters on {self._count:,} frozen ones"
    if self.abstract_base is None:
      return f"{self._count:,} parameters"
    tower = count(self.abstract_base)
    return f"{count(self.abstract):,} parameters beside {tower:,} of a frozen vision tower"

  def initial(self, key: jax.Array) -> Any:
    """The trained parameters before the first update, sharded on the mesh.

    They come from the checkpoint at model.path, or are random. With LoRA they come from lora.path,
    or are new adapters that do not change the model's outputs.
    """
    shardings = jax.tree.map(lambda x: x.sharding, self.abstract)
    if self._config.lora.path:
      adapters = model.load_adapters(self._config.lora.path, self.model)
      return jax.tree.map(_put, adapters, shardings)
    if self.model.lora is not None:
      init = functools.partial(model.init_adapters, config=self.model, base=self.abstract_base)
    elif self._config.model.path:
      return self._loaded(model.to_float32, self.abstract)
    else:
      init = functools.partial(model.init, config=self.model)
    return jax.jit(init, out_shardings=shardings)(key)

  def initial_reference(self, key: jax.Array) -> Any:
    """`reference(initial(key))`, without a float32 copy of a whole checkpoint."""
    if self.model.lora is None and self._config.model.path:
      return self._loaded(self._to_reference, self.abstract_reference)
    return self.reference(self.initial(key))

  def reference(self, trained: Any) -> Any:
    """A copy of the trained parameters for the reference, in model.reference_dtype."""
    return self._copy_reference(trained)

  @functools.cached_property
  def base(self) -> Any:
    """The frozen parameters, or None: with LoRA in lora.base_dtype, else in float32."""
    if self.abstract_base is None:
      return None
    if self.model.lora is None:
      return self._loaded(model.to_float32, self.abstract_base)
    convert = functools.partial(model.quantised, dtype=self._config.lora.base_dtype)
    return self._loaded(convert, self.abstract_base)

  def policy(self, trained: Any) -> Any:
    """All parameters of the policy: the base and the trained parameters."""
    return model.join(self.base, trained)

  def for_sampling(self, trained: Any) -> Any:
    """All parameters of the policy in sampling.dtype, on the sampler's mesh.

    The base is converted once and kept.
    """
    return model.join(self._sampling_base, self.sampling.convert(trained))

  @functools.cached_property
  def _sampling_base(self) -> Any:
    return None if self.base is None else self.sampling.convert(self.base)

  @functools.cached_property
  def _copy_reference(self) -> Callable[[Any], Any]:
    places = jax.tree.map(lambda x: x.sharding, self.abstract_reference)
    return jax.jit(self._reference_of, out_shardings=places)

  def _reference_of(self, trained: Any) -> Any:
    def copy(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
      name = leaf_path(path)
      return model.per_layer(functools.partial(self._to_reference, name), name)(x)

    return jax.tree_util.tree_map_with_path(copy, trained)

  @property
  def _to_reference(self) -> Callable[[str, jax.Array], jax.Array]:
    # Not a bound method: JAX keeps jitted functions alive, and would keep the weights of `self`.
    dtype = "" if self.model.lora is not None else self._config.model.reference_dtype
    return functools.partial(_reference_leaf, dtype=dtype)

  def _loaded(self, convert: Callable[[str, jax.Array], Any], abstract: Any) -> Any:
    """Loads the entries of the checkpoint that `abstract` has, converted, with its shardings.

    convert(name, array) returns the leaf for an array of the checkpoint.
    """
    path, converted = self._config.model.path, _places(abstract)
    # As they are read. `converted` has the shardings of the results.
    places = {
      name: place
      for name, place in self._checkpoint_places.items()
      if name.split("/")[0] in abstract
    }
    has_tower = self.model.vision is not None
    return model.load(path, places, convert, converted=converted, vision=has_tower)[1]

  def _base_of(self, params: Any) -> Any:
    def quantise(path: tuple[Any, ...], x: jax.Array) -> Any:
      name, dtype = leaf_path(path), self._config.lora.base_dtype
      convert = functools.partial(model.quantised, name, dtype=dtype)
      return model.per_layer(convert, name)(x)

    return jax.tree_util.tree_map_with_path(quantise, params)

  def _placed(self, abstract: Any) -> Any:
    return _at(abstract, sharding.param_specs(abstract, self._mesh))

  def _abstract_state(self) -> TrainState:
    optimizer = make_optimizer(self._config.optimizer, steps=1)  # its schedule has no shape
    init = functools.partial(learner.init_state, optimizer=optimizer, algo=self._config.algo)
    abstract = jax.eval_shape(init, self.abstract)
    return _at(abstract, sharding.state_shardings(abstract, self._mesh))

  def _held(self, mesh: Mesh) -> Held:
    """The arrays that the run holds, with the chosen sharding of the sampler's weights."""

    def held_on(there: Mesh) -> Held:
      """The arrays, if the sampler's mesh is `there`."""
      return Held(
        config=self._config,
        shape=self.model,
        state=self.abstract_state,
        base=self.abstract_base,
        reference=self.abstract_reference if self.has_reference_copy else None,
        weights=SamplingWeights(self.model, self._config.sampling, there),
        encodes_first=self.encodes_first,
      )

    device = mesh.devices.flat[0]
    tensor = fitting.sampling_tensor(
      self._config,
      self.model,
      lambda there: held_on(there).in_sampling,
      mesh,
      memory_of(device),
      chip_of(device),
    )
    return held_on(sampling_mesh(mesh, tensor, self._config.sampling.context))

  def _check_tower_adapters(self, whole: Any) -> None:
    """Raises ConfigError if the vision tower should be trained but gets no adapter."""
    if self.model.vision is None or self.model.has_frozen_tower or _TOWER in self.abstract:
      return
    modules = model.adaptable_modules({_TOWER: whole[_TOWER]}, self.model)
    advice = f"add one of {', '.join(modules)}" if modules else "it can have none"
    raise ConfigError(
      f"config key lora.targets is {self._config.lora.targets!r}: the vision tower gets no adapter,"
      f" though model.vision is 'trained'; {advice}, or set model.vision=frozen"
    )

  def _check_quantisation(self) -> None:
    """Raises ConfigError for a quantised mixture of experts."""
    config = self._config
    keys = {"sampling.weights_dtype": config.sampling.weights_dtype}
    if self.model.lora is not None:
      keys["lora.base_dtype"] = config.lora.base_dtype
    for key, dtype in keys.items():
      if self.model.num_experts and dtype in model.QUANTISED_DTYPES:
        raise ConfigError(
          f"config key {key} is {dtype!r}: experts, most of a mixture's weights, are not quantised"
          " here; leave it out"
        )


def count(params: Any) -> int:
  """The number of parameters in a tree."""
  return sum(x.size for x in jax.tree.leaves(params))


def has_quantised_base(config: Config) -> bool:
  """Whether lora.base_dtype quantises the weights, so that sampling.weights_dtype has no effect."""
  return bool(config.lora.rank) and config.lora.base_dtype in model.QUANTISED_DTYPES


def lora_of(config: Config) -> model.AdapterShape | None:
  """The shape of the config's adapters, or None. Raises ConfigError if lora.path has another."""
  lora = config.lora
  if not lora.rank:
    return None
  targets = model.kernels_of(lora.targets)
  described = model.AdapterShape(lora.rank, lora.alpha, lora.rslora, targets)
  if lora.path:
    for key, saved in dataclasses.asdict(model.load_adapter_shape(lora.path)).items():
      if saved != getattr(described, key):
        # The message gives a value that the config can hold: modules instead of kernels.
        value = model.modules_of(saved) if key == "targets" else saved
        raise ConfigError(
          f"config key lora.{key} is {getattr(lora, key)!r}: the adapters of {lora.path} have"
          f" {value!r}, set it to that"
        )
  return described


def _at(abstract: Any, places: Any) -> Any:
  """Adds shardings to shapes and dtypes."""

  def place(x: Any, where: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

  return jax.tree.map(place, abstract, places)


def _places(abstract: Any) -> Mapping[str, jax.sharding.Sharding]:
  """The sharding of every parameter, by its path."""
  return flatten_dict(jax.tree.map(lambda x: x.sharding, abstract), sep="/")


def _reference_leaf(name: str, x: jax.Array, dtype: str) -> jax.Array:
  del name
  x = x.astype("float32")  # a checkpoint's vectors may be bfloat16
  return jnp.copy(x.astype(matrix_dtype(x, x.ndim, dtype)))


def _put(x: Any, where: jax.sharding.Sharding) -> jax.Array:
  return jax.make_array_from_callback(x.shape, where, lambda index: x[index])


def load_frozen(
  folder: Path, config: model.ModelConfig, mesh: Mesh, labels: Collection[int] = (0,)
) -> Any:
  """Loads the parameters of a Hugging Face folder onto the mesh, for a model that is not trained.

  Without updates, matrices need no float32 copy: they are stored in `config.dtype`. Norm scales
  stay float32, because they are multiplied in float32.

  Args:
    folder: The folder.
    config: The shape of the model.
    mesh: The devices.
    labels: The heads that the model may have, as for `model.load`.

  Raises:
    ConfigError: The folder is incomplete or damaged.
  """
  abstract = jax.eval_shape(functools.partial(model.init, config=config), jax.random.key(0))
  places = flatten_dict(sharding.param_specs(abstract, mesh), sep="/")
  convert = functools.partial(model.quantised, dtype=config.dtype)  # which only casts matrices
  return model.load(folder, places, convert, labels)[1]
