"""Times the ways in which devices with different tokens compute attention, on simulated devices.

python experiments/exchanges.py S G T [--devices=4] [--heads=8] [--key-heads=2] [--window=0]
  One group: a prompt of S tokens and G completions of T, in float32 with heads of 64. Prints one
  line of JSON with the seconds of outputs and gradients, the median of 9 calls in turn, and the
  bytes that each device sends. All simulated devices share the cores of this machine, so that this
  is the work of all of them. `--window` is that of a layer.
"""

import argparse
import json
import os
import statistics
import time
from typing import Any

CALLS, E = 9, 64


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  for name in "SGT":
    parser.add_argument(name, type=int)
  parser.add_argument("--devices", type=int, default=4)
  parser.add_argument("--heads", type=int, default=8)
  parser.add_argument("--key-heads", type=int, default=2)
  parser.add_argument("--window", type=int, default=0)
  args = parser.parse_args()
  os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={args.devices}"

  import jax
  import jax.numpy as jnp

  from grpo_jax.around.planning.cost import count
  from grpo_jax.config import Mesh
  from grpo_jax.model.attention import View, context, implementation
  from grpo_jax.parallel.mesh import make_mesh
  from grpo_jax.parallel.sharding import tokens_sharding

  rows = tokens_sharding(make_mesh(Mesh(data=1, context=args.devices)))
  view = View(args.S, args.G, args.T, window=args.window, rows=rows)
  N, lengths_P = args.S + args.G * args.T, jnp.array([args.S])
  q, k, v, weights = (
    jax.device_put(jax.random.normal(jax.random.key(i), (1, N, heads, E)), rows)
    for i, heads in enumerate((args.heads, args.key_heads, args.key_heads, args.heads))
  )

  def program(exchange: context.Exchange) -> Any:
    def attend(q: Any, k: Any, v: Any, lengths_P: Any, packing: Any, view: View) -> Any:
      return implementation("chunked")(q, k, v, lengths_P, view)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
      context.EXCHANGES = (exchange,)
      out = context.across(attend, has_kernel=False)(q, k, v, lengths_P, None, view)
      return (out * weights).sum()

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(q, k, v).compile()

  possible = [x for x in context.EXCHANGES if args.window or not x.needs_window]
  programs = {exchange.name: program(exchange) for exchange in possible}
  times: dict[str, list[float]] = {name: [] for name in programs}
  for _ in range(CALLS + 1):
    for name, run in programs.items():
      start = time.perf_counter()
      jax.block_until_ready(run(q, k, v))
      times[name].append(time.perf_counter() - start)
  seconds = {name: statistics.median(own[1:]) for name, own in times.items()}
  sent = {name: count(run.as_text()).whole.link_bytes for name, run in programs.items()}
  found = {"load": os.getloadavg()[0], "seconds": seconds, "bytes_sent": sent}
  print(json.dumps({**vars(args), **found}))


if __name__ == "__main__":
  main()
