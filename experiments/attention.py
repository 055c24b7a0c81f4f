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

from grpo_jax.model.attention import ATTENTION, View

H, K, E = 14, 2, 64
CALLS = 20


def loss(
  q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, weights: jax.Array, **how: Any
) -> tuple[jax.Array, jax.Array]:
  """A weighted sum of the outputs, and the outputs. `how` has the name and the view."""
  outputs = ATTENTION[how["name"]](q, k, v, lengths, how["view"]).astype(jnp.float32)
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


def run_here(program: Any, view: View, shapes: Sequence[Any]) -> dict[str, Any]:
  """Runs the program on random numbers. Returns its time and its errors."""
  keys = jax.random.split(jax.random.key(0), 5)
  q, k, v, weights = (
    jax.device_put(jax.random.normal(key, x.shape).astype(x.dtype), x.sharding)
    for key, x in zip(keys, (*shapes[:3], shapes[4]))
  )
  lengths = jax.random.randint(keys[4], shapes[3].shape, 1, view.prompt_slots + 1)
  own = jnp.arange(view.prompt_slots) < lengths[:, None]  # what a prompt's padding holds is free
  slots = jnp.ones((lengths.shape[0], view.completions * view.slots), bool)
  mask = jnp.concatenate([own, slots], axis=1)[..., None, None]
  weights = jnp.where(mask, weights, 0)
  arguments = (q, k, v, jax.device_put(lengths, shapes[3].sharding), weights)
  times = []
  for _ in range(CALLS + 1):
    start = time.perf_counter()
    found = jax.block_until_ready(program(*arguments))
    times.append(time.perf_counter() - start)
  exact = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in arguments]
  wide = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in exact]
  with jax.default_matmul_precision("highest"):
    wanted = compiled("dense", view, wide)["program"](*exact)
  errors = [
    float(jnp.max(jnp.abs(jnp.where(mask, x.astype(jnp.float32) - y, 0))) / jnp.max(jnp.abs(y)))
    for x, y in zip((found[0][1], *found[1]), (wanted[0][1], *wanted[1]))
  ]
  return {"seconds": statistics.median(times[1:]), "errors": dict(zip("oqkv", errors))}


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
    devices = jax.devices()[:1]
  else:
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[:1]
  mesh = Mesh(np.array(devices).reshape(1, 1), ("data", "tensor"))
  rows = NamedSharding(mesh, PartitionSpec(("data",)))
  view = View(args.S, args.G, args.T, args.window, args.cap, rows)
  P, N = args.groups, args.S + args.G * args.T

  def array(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=rows)

  q, k, lengths = array(P, N, H, E), array(P, N, K, E), array(P, dtype="int32")
  shapes = (q, k, k, lengths, q)
  facts = compiled(args.name, view, shapes)
  program = facts.pop("program")
  if args.here:
    facts |= run_here(program, view, shapes)
  print(json.dumps({"device": devices[0].device_kind, "slots": N, **facts}))


if __name__ == "__main__":
  main()
