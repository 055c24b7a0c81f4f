"""Prompts that go on where earlier texts stopped: the same tokens, computed from there on."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from engine_test import Listener, ask, submit

from grpo_jax import model
from grpo_jax.config import Mesh
from grpo_jax.parallel.mesh import make_mesh
from grpo_jax.parallel.sharding import model_shardings, param_specs
from grpo_jax.sampler.logits import Decoding, RowSettings
from grpo_jax.sampler.stop import end_at
from grpo_jax.serving import decoder
from grpo_jax.serving.decoder import Sizes
from grpo_jax.serving.engine import Engine
from grpo_jax.serving.prefix_cache import Beginning, PrefixCache

FAMILIES = Path(__file__).parent / "golden" / "families"
S, T, ROWS = 90, 12, 4
EXACT = ("qwen3_5", "qwen3_5_moe", "qwen3_next")  # they have states, not keys of every token


@pytest.fixture(autouse=True)
def short_suffixes(monkeypatch):
  monkeypatch.setattr(decoder, "_SUFFIXES", (8, 24))


@pytest.fixture(scope="module")
def tiny():
  config = model.ModelConfig(
    vocab_size=96, embed_dim=16, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=32
  )
  return config, jax.jit(model.init, static_argnums=1)(jax.random.key(0), config)


def make(config, params, texts, rows=ROWS, version=1):
  stops = tuple(range(1, config.vocab_size, 10))  # about one token in ten ends a row
  sizes = Sizes(rows=rows, prompt_tokens=S, waiting=200, texts=texts)
  engine = Engine(config, Decoding(T, stops), sizes, params, version)
  engine.start()
  return engine


def text_of(ids):
  return "".join(f"<{i}>" for i in ids)


def play(engine, vocabulary, calls=4, conversations=6):
  """Conversations that grow, forks, and prompts that begin alike. All calls of a round at once.

  Returns:
    The tokens and log-probs of all calls, and how many tokens of their prompts were new.
  """
  rng = np.random.default_rng(1)

  def some(least, most):
    return rng.integers(2, vocabulary, rng.integers(least, most)).tolist()

  found, new, head = [], 0, some(9, 10)
  prompts = [head + some(1, 12) for _ in range(conversations)]
  prompts[1] = prompts[0]  # two rows of one prompt
  new += sum(map(len, prompts[1:])) - len(head) * (conversations - 2)
  for turn in range(calls):
    number = 100 * turn
    stop = end_at([text_of([i]) for i in range(3, vocabulary, 7)], text_of)
    kinds = [RowSettings(0.0, min_tokens=5), RowSettings(), RowSettings(max_tokens=3)]
    jobs = [
      (prompt, number + i, kinds[i % 3], stop if i % 4 == 3 else None)
      for i, prompt in enumerate(prompts)
    ]
    heard = ask(engine, *jobs)
    found += [(one.tokens, one.logprobs) for one in heard]
    if turn == 1:  # a fork: the last answer is left out
      forks = [prompt[: len(prompt) - 2] + some(1, 5) for prompt in prompts[:3]]
      found += [(one.tokens, one.logprobs) for one in ask(engine, *[(x, 7) for x in forks])]
      new += sum(len(x) - len(y) + 2 for x, y in zip(forks, prompts))
    added = [some(1, 9) for _ in prompts]
    prompts = [(x + one.tokens + y)[:S] for x, one, y in zip(prompts, heard, added)]
    if turn < calls - 1:
      new += sum(map(len, added)) + len(prompts)  # and the token that was drawn last
  return found, new


def assert_same(found, expected):
  assert len(found) == len(expected)
  for (tokens, logprobs), (wanted, near) in zip(found, expected):
    assert tokens == wanted
    np.testing.assert_allclose(logprobs, near, atol=1e-4)


FEW = ("gemma3", "qwen3_5", "deepseek_v3")
ALL = sorted(one.name for one in FAMILIES.iterdir() if "images" not in one.name)


@pytest.mark.slow
@pytest.mark.parametrize("cache_dtype", ["", "int8"])
@pytest.mark.parametrize("name", ALL)
def test_families_write_the_same_after_what_is_known(name, cache_dtype):
  """With windows, states, latent attention, borrowed keys and experts."""
  if cache_dtype and name not in FEW:
    pytest.skip("three families show it")
  config, params = model.load(FAMILIES / name)
  config = dataclasses.replace(config, dtype="float32", cache_dtype=cache_dtype)
  engines = [make(config, params, texts) for texts in (0, 8)]
  (expected, _), (found, new) = [play(engine, config.vocab_size) for engine in engines]
  for engine in engines:
    engine.close()
  assert_same(found, expected)
  whole, known = engines[0].counts, engines[1].counts
  assert known.prompt_tokens == whole.prompt_tokens == known.prompt_tokens
  print(name, whole.computed_tokens, known.computed_tokens, new, known.drops)
  assert known.computed_tokens < whole.computed_tokens
