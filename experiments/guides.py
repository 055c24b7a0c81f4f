"""Answers that must follow a schema: are they valid, what does it cost, and which library says it.

python experiments/guides.py [--schemas=200] [--layers=4] [--width=256]

It draws schemas, lets a random model answer each with an engine, checks the answers with
jsonschema, and times the same rows with and without a schema. Then it times the sampler of training
with and without sampling.regex and sampling.banned. With outlines_core installed, it also
times how long both libraries take to read a schema and to say what may follow.
"""

import argparse
from collections.abc import Sequence
import functools
import json
from pathlib import Path
import random
import statistics
import sys
import tempfile
import threading
import time
from typing import Any

import jax
import jsonschema
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from grpo_jax import model
from grpo_jax.config import Sampling
from grpo_jax.data.tokenizers import tokenizer
from grpo_jax.sampler.guides import Guide, guides_of
from grpo_jax.sampler.logits import Decoding, RowSettings
from grpo_jax.sampler.sampling import Draws, Sampler
from grpo_jax.serving.device_flight import Sizes
from grpo_jax.serving.engine import AnswerPart, Engine, Job
from grpo_jax.serving.guides import Guides
from grpo_jax.serving.requests import Form
from tests import small_qwen

ROWS, TOKENS = 8, 256
WORDS = "pens boxes Ann Bob red blue left right price count".split()


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
  """A schema whose answers are short."""
  kinds = ["integer", "boolean", "enum", "const", "null", "number"]
  kind = rng.choice([*kinds, "object", "array", "anyOf"] if depth else kinds)
  if kind == "object":
    names = rng.sample(WORDS, rng.randint(1, 3))
    needed = rng.sample(names, rng.randint(0, len(names)))
    inner = {name: random_schema(rng, depth - 1) for name in names}
    made = {"type": "object", "properties": inner, "additionalProperties": False}
    return made | ({"required": needed} if needed else {})
  if kind == "array":
    most = rng.randint(1, 3)
    return {"type": "array", "items": random_schema(rng, depth - 1), "maxItems": most}
  if kind == "anyOf":
    return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
  scalars: dict[str, dict[str, Any]] = {
    "integer": {"type": "integer", "minimum": 0, "maximum": rng.randint(1, 999)},
    "number": {"enum": [0.5, 1.25, -3]},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "enum": {"enum": rng.sample(WORDS, 3)},
    "const": {"const": rng.choice(WORDS)},
  }
  return scalars[kind]


def make(folder: Path, arguments: argparse.Namespace) -> tuple[Engine, tokenizer.Tokenizer, int]:
  """(engine, tokenizer, the model's vocabulary)"""
  texts = [problem["question"] + problem["answer"] for problem in small_qwen.problems(400)]
  small_qwen.make_checkpoint(
    folder,
    texts,
    embed_dim=arguments.width,
    num_layers=arguments.layers,
    num_heads=8,
    num_kv_heads=4,
    head_dim=arguments.width // 8,
    mlp_dim=4 * arguments.width,
  )
  config, params = model.load(folder)
  sizes = Sizes(rows=ROWS, prompt_tokens=64, waiting=10**4)
  engine = Engine(config, Decoding(TOKENS, config.stop_ids), sizes, params)
  engine.start()
  return engine, tokenizer.load(folder).for_model(config.vocab_size, "it"), config.vocab_size


def answers(
  engine: Engine, guides: Sequence[Guide | None], settings: RowSettings
) -> tuple[list[list[int]], float]:
  """(the tokens of each row, seconds) of rows with these guides, all of them at once."""
  rows: list[list[int]] = [[] for _ in guides]
  left, done = [len(guides)], threading.Event()

  def hear(place: int, part: AnswerPart) -> None:
    rows[place] += part.tokens
    left[0] -= bool(part.finish)
    if not left[0]:
      done.set()

  jobs = [
    Job((5, 6, 7), i, settings, functools.partial(hear, i), guide=guide)
    for i, guide in enumerate(guides)
  ]
  begun = time.monotonic()
  engine.submit(jobs)
  done.wait()
  return rows, time.monotonic() - begun


def speeds(engine: Engine, guides: Guides, rounds: int = 5) -> list[tuple[float, float]]:
  """Tokens a second, (with a schema, without) of rows of one length, in turn."""
  # A list without end: every row draws as many tokens as the rows without a schema.
  endless = Form("response_format", {"type": "array", "items": {"enum": WORDS}, "minItems": 500})
  settings = RowSettings(max_tokens=TOKENS, min_tokens=0)
  free = settings.replace(min_tokens=TOKENS)
  found = []
  for _ in range(rounds + 1):
    made, seconds = answers(engine, guides.of(endless, ROWS), settings)
    plain, without = answers(engine, [None] * ROWS, free)
    found.append((sum(map(len, made)) / seconds, sum(map(len, plain)) / without))
  return found[1:]  # the first compiles


def libraries(
  tokens: tokenizer.Tokenizer, vocabulary: int, schemas: Sequence[dict[str, Any]]
) -> None:
  """Prints how long each library takes to read a schema, and to say what may follow a token."""
  guides = Guides(tokens, vocabulary)
  guides.of(Form("", {"type": "object"}), 1)
  words = np.zeros(-(-vocabulary // 32), np.int32)
  read, fill = [], []
  for schema in schemas:
    begun = time.perf_counter()
    (guide,) = guides.of(Form("", schema), 1)
    read.append(time.perf_counter() - begun)
    begun = time.perf_counter()
    guide.fill(words)
    fill.append(time.perf_counter() - begun)
  say("llguidance", read, fill)
  try:
    from outlines_core import Guide, Index, Vocabulary
    from outlines_core.json_schema import build_regex_from_schema
  except ImportError:
    return
  texts: dict[str, list[int]] = {}
  for token in range(tokens.vocab_size):
    text = tokens.decode([token])
    if text and "\ufffd" not in text and token not in tokens.stop_ids:
      texts.setdefault(text, []).append(token)
  known = Vocabulary(tokens.stop_ids[0], texts)
  read, fill, failed = [], [], 0
  for schema in schemas:
    begun = time.perf_counter()
    try:
      guide = Guide(Index(build_regex_from_schema(json.dumps(schema)), known))
    except Exception:
      failed += 1
      continue
    read.append(time.perf_counter() - begun)
    begun = time.perf_counter()
    guide.get_tokens()
    fill.append(time.perf_counter() - begun)
  say("outlines_core", read, fill)
  print(f"outlines_core cannot read {failed} of {len(schemas)}")


# Expressions that end no row early, so that all draw as many tokens.
IN_TRAINING = {
  "regex": Sampling(regex="[^\\n]{9999}"),
  "banned": Sampling(banned=("pens", "zebra")),
}


def in_training(folder: Path, rounds: int = 5) -> None:
  """Prints the tokens a second of the sampler of training, with and without a constraint."""
  config, params = model.load(folder)
  tokens = tokenizer.load(folder).for_model(config.vocab_size, "it")
  prompts, lengths = np.tile([[5, 6, 7]], (ROWS, 1)).astype(np.int32), np.full(ROWS, 3, np.int32)
  decoding = Decoding(TOKENS, config.stop_ids)

  def speed(sampler: Sampler) -> float:
    settings = RowSettings(min_tokens=TOKENS)
    draws = Draws(jax.random.key(0), settings)
    begun = time.monotonic()
    parts = [*sampler(params, prompts, lengths, ROWS, draws)]
    drawn = sum(int(part.completions.lengths_PG.sum()) for part in parts)
    return drawn / (time.monotonic() - begun)

  plain = Sampler(config, decoding)
  for name, sampling in IN_TRAINING.items():
    guided = Sampler(config, decoding, guide=guides_of(sampling, tokens, config.vocab_size))
    found = [(speed(guided), speed(plain)) for _ in range(rounds + 1)][1:]  # the first compiles
    own, free = (statistics.median(x) for x in zip(*found, strict=True))
    ratio = statistics.median(a / b for a, b in found)
    print(f"training, {name}: {own:.0f} tokens/s, {free:.0f} without: {ratio:.2f}")


def say(name: str, read: list[float], fill: list[float]) -> None:
  cut = statistics.quantiles(read, n=20)[-1]
  print(
    f"{name}: a schema is read in {1e3 * statistics.median(read):.2f} ms (95%: {1e3 * cut:.2f}),"
    f" what may follow is known in {1e6 * statistics.median(fill):.0f} us"
  )


def main() -> None:
  parser = argparse.ArgumentParser()
  for name, default in (("schemas", 200), ("layers", 4), ("width", 256)):
    parser.add_argument(f"--{name}", type=int, default=default)
  arguments = parser.parse_args()
  print(jax.devices()[0].device_kind)
  rng = random.Random(0)
  schemas = [random_schema(rng) for _ in range(arguments.schemas)]
  with tempfile.TemporaryDirectory() as folder:
    engine, tokens, vocabulary = make(Path(folder), arguments)
    libraries(tokens, vocabulary, schemas)
    guides = Guides(tokens, vocabulary)
    own = [guides.of(Form("response_format", schema), 1)[0] for schema in schemas]
    rows, _ = answers(engine, own, RowSettings(max_tokens=TOKENS, min_tokens=0))
    valid = 0
    for schema, ids in zip(schemas, rows, strict=True):
      text = tokens.decode(ids)
      try:
        jsonschema.validate(json.loads(text), schema)
        valid += 1
      except (ValueError, jsonschema.ValidationError):
        print("not valid:", json.dumps(schema), repr(text), len(ids))
    print(f"{valid} of {len(schemas)} answers are valid")
    found = speeds(engine, guides)
    for guided, free in found:
      print(f"{guided:.0f} tokens/s with a schema, {free:.0f} without: {guided / free:.2f}")
    print(f"median {statistics.median(a / b for a, b in found):.2f}")
    engine.close()
    in_training(Path(folder))


if __name__ == "__main__":
  main()
