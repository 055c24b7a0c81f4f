"""Measures the attention of groups: memory, and on a device that is there also time and error.

python experiments/attention.py NAME S G T [--window=W] [--cap=C] [--groups=P]
  Compiles outputs and gradients of P groups with the implementation NAME: prompts of S tokens
  and G completions of T, in the shape of Qwen2.5-0.5B (14 query heads, 2 key and value heads of
  64) in bfloat16. It compiles for a TPU v5e, which need not be there. Needs jax[tpu].
  Prints one line of JSON, in bytes and seconds.

python experiments/attention.py NAME S G T --here
  Compiles for the first device of this machine and runs there. Adds seconds, the median of 20
  calls, and errors: the largest difference of the outputs and of each gradient from `dense` in
  float32, divided by the largest value there.
"""

import argparse
from collections.abc import Sequence
import functools
import json
import statistics
import time
from typing import Any

import jax
from jax.experimental import topologies
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from grpo_jax.model.attention import ATTENTION, View, implementation

H, K, E = 14, 2, 64
CALLS = 20


def loss(
  q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, weights: jax.Array, **how: Any
) -> tuple[jax.Array, jax.Array]:
  """A weighted sum of the outputs, and the outputs. `how` has the name and the view."""
  outputs = implementation(how["name"])(q, k, v, lengths, how["view"]).astype(jnp.float32)
  return (outputs * weights).sum(), outputs


def compiled(name: str, view: View, shapes: Sequence[Any]) -> dict[str, Any]:
  """Compiles outputs and gradients for the devices of `view.rows`: the program, and its facts."""
  start = time.perf_counter()
  function = functools.partial(loss, name=name, view=view)
  lowered = jax.jit(jax.value_and_grad(function, argnums=(0, 1, 2), has_aux=True)).lower(*shapes)
  lower_s = time.perf_counter() - start
  program = lowered.compile()
  memory = program.memory_analysis()
  return {
    "program": program,
    "lower_s": lower_s,
    "compile_s": time.perf_counter() - start - lower_s,
    "arguments": memory.argument_size_in_bytes,
    "temporary": memory.temp_size_in_bytes,
  }


class Bench:
  """Groups of one size on one device, and what `dense` in float32 makes of them.

  Attributes:
    slots: The tokens of a group.
  """

  def __init__(
    self,
    S: int,
    G: int,
    T: int,
    groups: int,
    device: jax.Device,
    *,
    window: int = 0,
    cap: float = 0.0,
  ) -> None:
    """`groups` groups of a prompt of S tokens and G completions of T.

    A program is only compiled for a device that is described and not there.
    """
    mesh = Mesh(np.array([device]).reshape(1, 1), ("data", "tensor"))
    self._rows = NamedSharding(mesh, PartitionSpec(("data",)))
    self._view = View(S, G, T, window=window, cap=cap, rows=self._rows)
    self.slots = S + G * T
    q, k = self._array(groups, self.slots, H, E), self._array(groups, self.slots, K, E)
    self._shapes = (q, k, k, self._array(groups, dtype="int32"), q)

  def measure(self, name: str, here: bool) -> dict[str, Any]:
    """Compiles an implementation. If `here`, also runs it on random numbers."""
    facts = compiled(name, self._view, self._shapes)
    program = facts.pop("program")
    return facts | self._run(program) if here else facts

  def _array(self, *shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=self._rows)

  def _run(self, program: Any) -> dict[str, Any]:
    """The time and the errors of a program."""
    times = []
    for _ in range(CALLS + 1):
      start = time.perf_counter()
      found = jax.block_until_ready(program(*self._arguments))
      times.append(time.perf_counter() - start)
    wanted, mask = self._wanted, self._mask
    errors = [
      float(jnp.max(jnp.abs(jnp.where(mask, x.astype(jnp.float32) - y, 0))) / jnp.max(jnp.abs(y)))
      for x, y in zip((found[0][1], *found[1]), (wanted[0][1], *wanted[1]))
    ]
    return {"seconds": statistics.median(times[1:]), "errors": dict(zip("oqkv", errors))}

  @functools.cached_property
  def _mask(self) -> jax.Array:
    """Which slots hold tokens. What a prompt's padding holds is free."""
    view, lengths = self._view, self._lengths
    own = jnp.arange(view.prompt_slots) < lengths[:, None]
    slots = jnp.ones((lengths.shape[0], view.completions * view.slots), bool)
    return jnp.concatenate([own, slots], axis=1)[..., None, None]

  @functools.cached_property
  def _lengths(self) -> jax.Array:
    key = jax.random.split(jax.random.key(0), 5)[4]
    return jax.random.randint(key, self._shapes[3].shape, 1, self._view.prompt_slots + 1)

  @functools.cached_property
  def _arguments(self) -> tuple[jax.Array, ...]:
    """Random numbers."""
    shapes = self._shapes
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v, weights = (
      jax.device_put(jax.random.normal(key, x.shape).astype(x.dtype), x.sharding)
      for key, x in zip(keys, (*shapes[:3], shapes[4]))
    )
    weights = jnp.where(self._mask, weights, 0)
    return q, k, v, jax.device_put(self._lengths, shapes[3].sharding), weights

  @functools.cached_property
  def _wanted(self) -> Any:
    """Outputs and gradients by `dense` in float32."""
    exact = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in self._arguments]
    wide = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in exact]
    with jax.default_matmul_precision("highest"):
      return compiled("dense", self._view, wide)["program"](*exact)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("name", choices=ATTENTION)
  for name in "SGT":
    parser.add_argument(name, type=int)
  parser.add_argument("--window", type=int, default=0)
  parser.add_argument("--cap", type=float, default=0.0)
  parser.add_argument("--groups", type=int, default=1)
  parser.add_argument("--here", action="store_true", help="run on the first device of this machine")
  args = parser.parse_args()
  if args.here:
    device = jax.devices()[0]
  else:
    device = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
  sizes = (args.S, args.G, args.T, args.groups)
  bench = Bench(*sizes, device, window=args.window, cap=args.cap)
  facts = bench.measure(args.name, args.here)
  print(json.dumps({"device": device.device_kind, "slots": bench.slots, **facts}))


if __name__ == "__main__":
  main()
