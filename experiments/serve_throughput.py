"""Tokens per second of the endpoint, of its engine alone, and of the sampler, for the same rows.

python experiments/serve_throughput.py [--rows=32] [--requests=200] [--layers=4]

A random model completes as many prompts as there are requests, 64 tokens each. The endpoint is
asked by as many streams at once, from a process of its own.
"""

import argparse
import asyncio
from collections.abc import Callable
import json
import queue
import subprocess
import sys
import threading
import time

import jax
import numpy as np

from grpo_jax import model
from grpo_jax.data.tokenizers import tokenizer
from grpo_jax.sampler.logits import Decoding, RowSettings
from grpo_jax.sampler.sampling import Draws, Sampler, whole
from grpo_jax.serving.device_flight import Sizes
from grpo_jax.serving.engine import AnswerPart, Engine, Job
from grpo_jax.serving.server import Server, ServerSettings

TOKENS, PROMPT = 64, 32
OFF = RowSettings(1.0, 0, 1.0, 0.0, 0, TOKENS)  # arrays that change nothing, as the engine has them


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument("--rows", type=int, default=32)
  parser.add_argument("--requests", type=int, default=200)
  parser.add_argument("--layers", type=int, default=4)
  parser.add_argument("--ask", default="")  # in the process of the clients: the address
  flags = parser.parse_args()
  if flags.ask:
    print(asyncio.run(ask_all(flags.ask, flags.requests)))
    return
  config = model.ModelConfig(
    vocab_size=4096,
    embed_dim=256,
    num_layers=flags.layers,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    mlp_dim=1024,
  )
  params = jax.jit(model.init, static_argnums=1)(jax.random.key(0), config)
  sizes = Sizes(flags.rows, PROMPT, waiting=flags.requests, texts=4 * flags.rows)
  engine = Engine(config, Decoding(TOKENS), sizes, params)
  engine.start()
  sampler = Sampler(config, Decoding(TOKENS), rows=flags.rows)
  address, stop = serve(engine)
  tokens = flags.requests * TOKENS
  for _ in range(3):
    seconds = {
      "sampler": sampler_seconds(sampler, params, flags.requests, RowSettings()),
      "sampler with arrays": sampler_seconds(sampler, params, flags.requests, OFF),
      "engine": engine_seconds(engine, flags.requests),
      "endpoint": endpoint_seconds(address, flags.requests),
    }
    print(json.dumps({name: round(tokens / took) for name, took in seconds.items()}), flush=True)
  stop()


def prompts(count: int) -> np.ndarray:
  """Token ids, other ones for each prompt."""
  return np.random.default_rng(0).integers(2, 100, (count, PROMPT)).astype(np.int32)


def sampler_seconds(
  sampler: Sampler, params: model.Params, count: int, settings: RowSettings
) -> float:
  """How long the sampler takes. What it draws with is compiled in a call before."""
  lengths = np.full(count, PROMPT, np.int32)
  draws = Draws(jax.random.key(0), settings)
  for _ in range(2):
    start = time.perf_counter()
    whole(sampler(params, prompts(count), lengths, 1, draws))
  return time.perf_counter() - start


def engine_seconds(engine: Engine, count: int) -> float:
  """How long the engine takes without HTTP."""
  ended: queue.Queue[str] = queue.Queue()

  def hear(part: AnswerPart) -> None:
    if part.finish:
      ended.put(part.finish)

  settings = RowSettings(1.0)
  jobs = [Job(tuple(ids), i, settings, hear) for i, ids in enumerate(prompts(count).tolist())]
  start = time.perf_counter()
  engine.submit(jobs)
  for _ in jobs:
    ended.get()
  return time.perf_counter() - start


def endpoint_seconds(address: str, count: int) -> float:
  """How long the endpoint takes, as the clients see it."""
  command = [sys.executable, __file__, f"--ask={address}", f"--requests={count}"]
  return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


async def ask_all(address: str, count: int) -> float:
  """Asks `count` streams at once, and returns the seconds until the last has ended."""
  import aiohttp

  async def ask(session: aiohttp.ClientSession, ids: list[int]) -> None:
    body = {"prompt": ids, "max_tokens": TOKENS, "stream": True}
    async with session.post(f"{address}/v1/completions", json=body) as answer:
      text = await answer.text()
      assert text.endswith("data: [DONE]\n\n"), text

  async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
    start = time.perf_counter()
    await asyncio.gather(*(ask(session, ids) for ids in prompts(count).tolist()))
    return time.perf_counter() - start


def serve(engine: Engine) -> tuple[str, Callable[[], None]]:
  """(the address of a server in a thread of its own, what stops it)"""
  found: dict = {}
  started = threading.Event()
  tokens = tokenizer.characters("".join(chr(33 + i) for i in range(98)))

  async def run() -> None:
    found["loop"], found["stop"] = asyncio.get_running_loop(), asyncio.Event()
    server = Server(engine, tokens, 4096, ServerSettings("m", grace=1.0))
    await server.run("127.0.0.1", 0, found["stop"], ready)

  def ready(host: str, port: int) -> None:
    found["address"] = f"http://{host}:{port}"
    started.set()

  thread = threading.Thread(target=lambda: asyncio.run(run()))
  thread.start()
  started.wait()

  def stop() -> None:
    found["loop"].call_soon_threadsafe(found["stop"].set)
    thread.join()

  return found["address"], stop


if __name__ == "__main__":
  main()
