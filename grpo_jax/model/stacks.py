"""Which layers are stacked in one array, and conversions between single layers and stacks.

The tree of parameters has an entry for each stack, not for each layer. `layers_0` holds layer 0 and
all later layers that are scanned together with it, on a first axis. In a model whose layers
alternate, such as Gemma 2 with a window in every other layer, `layers_0` holds layers 0, 2, 4, ...
and `layers_1` holds layers 1, 3, 5, ... A `Segment` is a sequence of layers that repeats a pattern.
"""

from collections.abc import Callable, Mapping
import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from grpo_jax.model.config import ModelConfig

_LONGEST_PERIOD = 16  # the longest pattern that `segments` tries, in layers
TOWER = "vision/"  # the beginning of the paths of the vision tower


@dataclasses.dataclass(frozen=True)
class Segment:
  """Layers `first` to `first + period * count - 1`: a pattern of `period` layers, `count` times.

  Layer first + period * k + j is number k in the stack `layers_{first + j}`.
  """

  first: int
  period: int
  count: int

  @property
  def names(self) -> list[str]:
    """The entries of the tree of parameters that hold the segment's stacks."""
    return [f"layers_{self.first + j}" for j in range(self.period)]

  @property
  def end(self) -> int:
    """The number of the first layer after the segment."""
    return self.first + self.period * self.count


def segments(config: ModelConfig) -> list[Segment]:
  """The segments of a model, in the order of its layers.

  Starting at the first layer, each segment takes the pattern whose repetitions cover the most
  layers. An unrolled model has a segment for each layer.
  """
  L = config.num_layers
  if config.unrolled:
    return [Segment(layer, 1, 1) for layer in range(L)]
  kinds = [config.kind(layer) for layer in range(L)]
  found: list[Segment] = []
  first = 0
  while first < L:
    candidates = [_segment(kinds, first, period) for period in range(1, _LONGEST_PERIOD + 1)]
    # A pattern must repeat, unless it is a single layer.
    repeating = [segment for segment in candidates if segment.count > 1 or segment.period == 1]
    # Of patterns that cover the same number of layers, max takes the first, the shortest.
    found.append(max(repeating, key=lambda segment: segment.end))
    first = found[-1].end
  return found


def _segment(kinds: list[Any], first: int, period: int) -> Segment:
  """The segment with the given first layer and period that has the most layers."""
  pattern, count = kinds[first : first + period], 1
  start = first + period
  while kinds[start : start + period] == pattern:
    count, start = count + 1, start + period
  return Segment(first, period, count)


def stacks(config: ModelConfig) -> dict[str, list[int]]:
  """The layers that each stack holds, in their order: {"layers_0": [0, 2, 4], ...}."""
  return {
    name: list(range(segment.first + j, segment.end, segment.period))
    for segment in segments(config)
    for j, name in enumerate(segment.names)
  }


def _all_stacks(config: ModelConfig) -> dict[str, list[int]]:
  """`stacks`, and the stack of the vision tower, whose layers are all equal."""
  tower = {f"{TOWER}layers_0": list(range(config.vision.num_layers))} if config.vision else {}
  return stacks(config) | tower


def sparse_stacks(config: ModelConfig) -> dict[str, list[int]]:
  """For each stack with experts, the indices of its layers among the model's sparse layers."""
  place = {layer: i for i, layer in enumerate(sorted(config.sparse_layers))}
  return {
    name: [place[number] for number in numbers]
    for name, numbers in stacks(config).items()
    if numbers[0] in place
  }


def is_stacked(name: str) -> bool:
  """Whether the parameter of this path, such as layers_0/mlp/up/kernel, has an axis of layers."""
  return name.removeprefix(TOWER).startswith("layers_")


def per_layer(function: Callable[..., Any], name: str) -> Callable[..., Any]:
  """Maps a function of one layer's arrays over the layers of parameter `name`, if it is stacked."""
  return jax.vmap(function) if is_stacked(name) else function


def stacked(
  layers: Mapping[str, Any], config: ModelConfig, stack: Callable[..., Any] = jnp.stack
) -> dict[str, Any]:
  """Stacks a tree of parameters whose `layers_{i}` hold single layers.

  `stack` joins a list of the arrays of several layers. It is np.stack for arrays that stay on the
  host. Adapters may lack all layers of a stack: then the result lacks the stack.
  """
  tree = {name: entry for name, entry in layers.items() if not is_stacked(name)}
  for name, numbers in stacks(config).items():
    if f"layers_{numbers[0]}" not in layers:
      continue
    of_stack = [layers[f"layers_{number}"] for number in numbers]
    tree[name] = jax.tree.map(lambda *leaves: stack(leaves), *of_stack)
  if "vision" in layers:
    tree["vision"] = _stacked_tower(layers["vision"], stack)
  return tree


def _stacked_tower(layers: Mapping[str, Any], stack: Callable[..., Any]) -> dict[str, Any]:
  """The parameters of a vision tower whose layers are single, with all layers in one stack."""
  tree = {name: entry for name, entry in layers.items() if not is_stacked(name)}
  names = sorted(layers.keys() - tree.keys(), key=lambda name: int(name.split("_")[1]))
  if names:
    of_stack = [layers[name] for name in names]
    tree["layers_0"] = jax.tree.map(lambda *leaves: stack(leaves), *of_stack)
  return tree


def unrolled(params: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
  """Converts the parameters of `config` to stacks of one layer each, as with `config.unrolled`."""
  tree = {name: entry for name, entry in params.items() if not is_stacked(name)}
  for name, numbers in stacks(config).items():
    if name not in params:  # no layer of the stack has an adapter
      continue
    for place, number in enumerate(numbers):
      tree[f"layers_{number}"] = jax.tree.map(lambda x, at=place: x[at : at + 1], params[name])
  return tree


class Places:
  """Finds the arrays of single layers in the stacks of a model."""

  def __init__(self, config: ModelConfig) -> None:
    self._places = {
      f"{stack.removesuffix(stack.split('/')[-1])}layers_{number}": (stack, place)
      for stack, numbers in _all_stacks(config).items()
      for place, number in enumerate(numbers)
    }
    self._sizes = {stack: len(numbers) for stack, numbers in _all_stacks(config).items()}

  def find(self, name: str) -> tuple[str, int | None]:
    """The parameter that holds the array `name` of a single layer: its name, and an index.

    This is the layer's index on the parameter's first axis, or None outside of the layers.
    """
    if not is_stacked(name):
      return name, None
    layer, rest = _split(name)
    stack, place = self._places[layer]
    return f"{stack}/{rest}", place

  def take(self, leaves: Mapping[str, Any], name: str) -> Any:
    """The array `name` of a single layer, from a mapping of names to parameters."""
    stack, place = self.find(name)
    return leaves[stack] if place is None else leaves[stack][place]

  def shape(self, name: str, of_layer: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the parameter `name` whose single layers have the shape `of_layer`."""
    return (self._sizes[_split(name)[0]], *of_layer) if is_stacked(name) else of_layer


def _split(name: str) -> tuple[str, str]:
  """The path of a layer or stack, and the path of a parameter within it."""
  found = re.match(rf"((?:{TOWER})?layers_\d+)/(.*)", name)
  return found[1], found[2]


def of_layer(sharding: NamedSharding) -> NamedSharding:
  """The sharding of a single layer of a stacked parameter."""
  return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))


def layer_names(name: str, config: ModelConfig) -> list[str]:
  """The paths of the single layers whose arrays the parameter `name` holds, in their order.

  The separator of the path may be any character. The list is empty for other parameters.
  """
  found = re.search(r"\blayers_\d+", name)
  if found is None:
    return []
  before, after = name[: found.start()], name[found.end() :]
  of_tower = TOWER if re.search(r"\bvision\W+$", before) else ""
  numbers = _all_stacks(config).get(of_tower + found.group(), [])
  return [f"{before}layers_{number}{after}" for number in numbers]
