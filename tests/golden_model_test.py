"""The decoder computes what transformers computes, from the same files (tests/golden/make_*.py): in one pass, angles
computed; with a cache token by token, and with prompts shared by groups, angles from a table. `pytest -s -n 0` prints the
largest differences."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import model
from grpo_jax.config import Learner, Sampling
from grpo_jax.learner import train_step as learner
from grpo_jax.run import rollout
from grpo_jax.types import Batch

GOLDEN = Path(__file__).parent / "golden"
FOLDERS = [GOLDEN / "qwen2_tied", GOLDEN / "qwen2_untied", *sorted((GOLDEN / "families").iterdir())]
BOUND, G = 1e-4, 2


@pytest.fixture(scope="module", params=FOLDERS, ids=lambda folder: folder.name)
def golden(request):
  config, params = model.load(request.param)
  return request.param, config, params, np.load(request.param / "expected.npz")


def check(golden, how, logits, expected, valid):
  difference = np.abs(np.where(valid[..., None], logits - expected, 0)).max()
  print(f"{golden[0].name}, {how}: largest difference of a logit {difference:.1e}")
  assert valid.any() and np.abs(expected[valid]).max() > 1 and difference <= BOUND


def rows(expected):
  """tokens [B, T], their positions, and which of them count."""
  tokens_BT = jnp.asarray(expected["tokens"])
  positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
  return tokens_BT, positions_BT, np.arange(tokens_BT.shape[1]) < expected["lengths"][:, None]


def test_logits_are_those_of_transformers(golden):
  _, config, params, expected = golden
  tokens_BT, positions_BT, valid_BT = rows(expected)
  logits_BTV, _ = jax.jit(lambda p: model.forward(p, config, tokens_BT, positions_BT))(params)
  check(golden, "one pass", logits_BTV, expected["logits"], valid_BT)


@pytest.mark.parametrize("token_by_token", [False, True])
def test_with_a_shared_prompt_too(golden, token_by_token):
  """Prompts of 17, 9 and 1 tokens, each computed once, and two equal rows of the tokens after it to each."""
  _, config, params, expected = golden
  tokens_BT, _, valid_BT = rows(expected)
  P, length = len(tokens_BT), tokens_BT.shape[1]
  config = dataclasses.replace(config, length=length)
  lengths_P = np.minimum([17, 9, 1], expected["lengths"])
  count = length - 17 - 1
  where_PT = lengths_P[:, None] + np.arange(count)
  own_BT = jnp.repeat(jnp.take_along_axis(tokens_BT, where_PT, axis=1), G, axis=0)
  positions_BT = jnp.repeat(where_PT, G, axis=0)

  @jax.jit
  def run(params):
    _, cache = model.features(
      params, config, tokens_BT[:, :17], jnp.broadcast_to(jnp.arange(17), (P, 17))
    )
    prefix = model.share(cache, jnp.asarray(lengths_P))
    if not token_by_token:
      return model.forward(params, config, own_BT, positions_BT, model.empty(config, prefix, G, 0))[
        0
      ]

    def step(cache, inputs):
      logits, cache = model.forward(params, config, *(x[:, None] for x in inputs), cache)
      return cache, logits[:, 0]

    return jax.lax.scan(step, model.empty(config, prefix, G, count), (own_BT.T, positions_BT.T))[
      1
    ].swapaxes(0, 1)

  take = lambda x: np.repeat(
    np.take_along_axis(x, where_PT.reshape(P, count, *[1] * (x.ndim - 2)), axis=1), G, axis=0
  )
  check(
    golden,
    "token by token" if token_by_token else "shared prompt",
    run(params),
    take(expected["logits"]),
    take(valid_BT),
  )


@pytest.mark.parametrize("name", ["gemma3", "llama_dynamic"])
def test_what_is_sampled_is_what_is_learned(name):
  """Completions far beyond windows and original positions: log-probs of sampler and learner agree."""
  config, params = model.load(GOLDEN / "families" / name)
  sampling = Sampling(30, 1.0, 0, 1.0, 0.0, (), "", "train")
  prompts_PS, lengths_P = jnp.arange(4, 40).reshape(3, 12), jnp.array([12, 5, 1])
  out = jax.jit(rollout.make_sampler(config, sampling, G))(
    params, prompts_PS, lengths_P, jax.random.key(0)
  )
  mask = (jnp.arange(30) < out.lengths_PG[..., None]).astype(jnp.float32)
  batch = Batch(prompts_PS, lengths_P, out.tokens_PGT, mask, None, None)
  ours = jax.jit(lambda p: learner.stats(p, None, config, batch, 1.0, Learner(False, 64, 0.0)))(
    params
  ).logprobs_PGT
  assert out.lengths_PG.max() == 30 and np.abs(ours - out.logprobs_PGT * mask).max() < 1e-4
