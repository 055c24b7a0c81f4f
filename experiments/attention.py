"""Measures the memory that attention takes on a TPU v5e, by the TPU's compiler. Needs no TPU.

python experiments/attention.py NAME S G T [WINDOW [CAP]]
  Compiles outputs and gradients of one group with the implementation NAME: a prompt of S tokens
  and G completions of T, in the shape of Qwen2.5-0.5B (14 query heads, 2 key and value heads of
  64) in bfloat16. Needs jax[tpu]. Prints one line of JSON, in bytes and seconds.
"""

from collections.abc import Sequence
import json
import sys
import time

import jax
from jax.experimental import topologies
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from grpo_jax.model.attention import ATTENTION, View

H, K, E = 14, 2, 64


def compile_for_tpu(name: str, view: View) -> dict[str, float]:
  """Compiles the attention of one group, and its gradient, for the device of `view.rows`."""

  def loss(
    q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, weights: jax.Array
  ) -> jax.Array:
    return (ATTENTION[name](q, k, v, lengths, view).astype(jnp.float32) * weights).sum()

  N = view.prompt_slots + view.completions * view.slots

  def array(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=view.rows)

  q, k, lengths = array(1, N, H, E), array(1, N, K, E), array(1, dtype="int32")
  start = time.perf_counter()
  lowered = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(q, k, k, lengths, q)
  lower_s = time.perf_counter() - start
  memory = lowered.compile().memory_analysis()
  return {
    "slots": N,
    "lower_s": lower_s,
    "compile_s": time.perf_counter() - start - lower_s,
    "arguments": memory.argument_size_in_bytes,
    "temporary": memory.temp_size_in_bytes,
  }


def main(arguments: Sequence[str]) -> None:
  name, S, G, T, *rest = arguments
  window, cap = [*rest, "0", "0"][:2]
  topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
  mesh = Mesh(np.array(topology.devices[:1]).reshape(1, 1), ("data", "tensor"))
  rows = NamedSharding(mesh, PartitionSpec(("data",)))
  view = View(int(S), int(G), int(T), int(window), float(cap), rows)
  print(json.dumps(compile_for_tpu(name, view)))


if __name__ == "__main__":
  main(sys.argv[1:])
