"""The decoder computes what transformers computes from the same files (tests/golden/make_*.py).

It does so in one pass, where angles are computed, and with a shared prompt, where angles come from
a table: as the learner does it, and with the cache in one pass and token by token. Run
`pytest -s -n 0` to print the largest differences.
"""

import collections
import dataclasses
import itertools
from pathlib import Path

from flax.traverse_util import flatten_dict
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import learner, model
from grpo_jax.config import Learner
from grpo_jax.model.huggingface import families
from grpo_jax.model.stacks import Places
from grpo_jax.sampler.logits import Decoding
from grpo_jax.sampler.sampling import Draws, Sampler, whole
from grpo_jax.types import Batch

GOLDEN = Path(__file__).parent / "golden"
FOLDERS = [GOLDEN / "qwen2_tied", GOLDEN / "qwen2_untied", *sorted((GOLDEN / "families").iterdir())]
# What another checkpoint of their family tests too.
_SLOW = (
  *("deepseek_v3_dense", "deepseek_v3_yarn", "gpt_oss_mxfp4", "glm4_moe_lite"),
  *("gemma3_images", "gemma3_scaled", "gemma4_images", "qwen3_5_images", "qwen3_5_moe"),
  *("gemma4_moe", "qwen3_moe_mixed", "qwen3_biases", "llama_biases", "smollm3_window"),
  # What the tests of their kind of layer test, too.
  *("qwen3_next", "olmo3", "olmo2", "gpt_oss", "glm4_moe", "smollm3", "gemma4_e", "qwen2_untied"),
  *("qwen2_window", "phi3_longrope", "gemma3", "phi3_partial", "granite", "qwen3_fp8"),
  "gemma2",
)
# One of each kind of cache: whole, states, latents. The oldest family is fast in every way.
# The others are fast token by token, which has every position. Windows and lent keys are slow.
_CACHES = "qwen2_tied", "qwen3_5", "deepseek_v3"
BOUND, G = 1e-4, 2


def of_each_folder(is_slow):
  """Parametrises a test with the checkpoints of the folders, some of which are slow."""
  params = [
    pytest.param(folder, id=folder.name, marks=pytest.mark.slow if is_slow(folder.name) else ())
    for folder in FOLDERS
  ]
  return pytest.mark.parametrize("golden", params, indirect=True)


@pytest.fixture(scope="module")
def golden(request):
  config, params = model.load(request.param)
  return request.param, config, params, np.load(request.param / "expected.npz")


def _ways_of_caches():
  """Every checkpoint with each way to compute a shared prompt."""
  for folder, how in itertools.product(FOLDERS, ("learner", "cache", "token by token")):
    is_fast = folder.name in _CACHES and (how == "token by token" or folder.name == "qwen2_tied")
    marks = () if is_fast else pytest.mark.slow
    yield pytest.param(folder, how, id=f"{how}-{folder.name}", marks=marks)


def assert_close(golden, how, logits, expected, valid):
  difference = np.abs(np.where(valid[..., None], logits - expected, 0)).max()
  print(f"{golden[0].name}, {how}: largest difference of a logit {difference:.1e}")
  assert valid.any() and np.abs(expected[valid]).max() > 1 and difference <= BOUND


def rows(expected):
  """Tokens [B, T], their positions, and which of them are not padding."""
  tokens_BT = jnp.asarray(expected["tokens"])
  positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
  return tokens_BT, positions_BT, np.arange(tokens_BT.shape[1]) < expected["lengths"][:, None]


@of_each_folder(lambda name: name in _SLOW)
def test_logits_are_those_of_transformers(golden):
  _, config, params, expected = golden
  tokens_BT, positions_BT, valid_BT = rows(expected)
  logits_BTV, _ = jax.jit(lambda p: model.forward(p, config, tokens_BT, positions_BT))(params)
  assert_close(golden, "one pass", logits_BTV, expected["logits"], valid_BT)


@pytest.mark.slow
@pytest.mark.parametrize("golden, how", list(_ways_of_caches()), indirect=["golden"])
def test_logits_with_a_shared_prompt_are_those_of_transformers(golden, how):
  """Prompts of 17, 9 and 1 tokens, each computed once for two equal rows of the tokens after it."""
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
    if how == "learner":
      groups = model.Groups(jnp.asarray(lengths_P), 17, G, count)
      tokens_PN = jnp.concatenate([tokens_BT[:, :17], own_BT.reshape(P, G * count)], 1)
      hidden_PND, _ = model.group_features(params, config, tokens_PN, groups)
      return model.unembed(params, config, hidden_PND[:, 17:].reshape(P * G, count, -1))

    prompt_positions_PS = jnp.broadcast_to(jnp.arange(17), (P, 17))
    prompts = tokens_BT[:, :17], prompt_positions_PS
    _, cache = model.features(params, config, *prompts, lengths_B=jnp.asarray(lengths_P))
    prefix = model.as_prefix(cache, jnp.asarray(lengths_P))
    cache = model.empty_cache(config, prefix, G, slots=count)
    if how == "cache":
      logits_BTV, _ = model.forward(params, config, own_BT, positions_BT, cache)
      return logits_BTV

    def step(cache, inputs):
      tokens_B, positions_B = inputs
      logits_B1V, cache = model.forward(
        params, config, tokens_B[:, None], positions_B[:, None], cache
      )
      return cache, logits_B1V[:, 0]

    _, logits_TBV = jax.lax.scan(step, cache, (own_BT.T, positions_BT.T))
    return logits_TBV.swapaxes(0, 1)

  def take_own(x):
    """Of an array [P, length, ...], what belongs to the rows' own tokens: [B, count, ...]."""
    where = where_PT.reshape(P, count, *[1] * (x.ndim - 2))
    return np.repeat(np.take_along_axis(x, where, axis=1), G, axis=0)

  expected_BTV, valid_BT = take_own(expected["logits"]), take_own(valid_BT)
  assert_close(golden, f"shared prompt, {how}", run(params), expected_BTV, valid_BT)


@pytest.mark.slow
@pytest.mark.parametrize(
  "name",
  [
    "qwen3_5",
    *("gemma3", "gemma4_e", "llama_dynamic"),
  ],
)
def test_log_probs_of_sampler_and_learner_agree(name):
  """In completions that are much longer than windows and original positions."""
  config, params = model.load(GOLDEN / "families" / name)
  decoding = Decoding(max_tokens=30, stop_ids=config.stop_ids)
  temperature_P = jnp.ones(3)
  prompts_PS, lengths_P = np.arange(4, 40).reshape(3, 12), np.array([12, 5, 1])
  draws = Draws(jax.random.key(0))
  out = whole(Sampler(config, decoding)(params, prompts_PS, lengths_P, G, draws))
  mask = (jnp.arange(30) < out.lengths_PG[..., None]).astype(jnp.float32)
  batch = Batch(
    prompts_PS=prompts_PS,
    prompt_lengths_P=lengths_P,
    completions_PGT=out.tokens_PGT,
    mask_PGT=mask,
    temperature_P=temperature_P,
  )
  options = learner.StatsOptions(config, Learner(logprob_chunk=64))
  stats = jax.jit(learner.batch_stats, static_argnums=3)
  logprobs_PGT = stats(params, None, batch, options).logprobs_PGT
  assert out.lengths_PG.max() == 30 and np.abs(logprobs_PGT - out.logprobs_PGT * mask).max() < 1e-4


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(x, marks=pytest.mark.slow)
    for x in ("deepseek_v3_dense", "gemma4_e", "gpt_oss", "qwen3_5")
  ],
)
def test_gradients_are_those_of_transformers(name):
  """Of every tensor, with right-padded prompts as the learner computes them."""
  folder = GOLDEN / "families" / name
  config, params = model.load(folder)
  expected, gradients = np.load(folder / "expected.npz"), np.load(folder / "gradients.npz")
  tokens_BT, _, valid_BT = rows(expected)
  groups = model.Groups(jnp.asarray(expected["lengths"]), tokens_BT.shape[1])

  def loss(params):
    hidden_BTD, _ = model.group_features(params, config, tokens_BT, groups)
    probs_BTV = jax.nn.softmax(model.unembed(params, config, hidden_BTD))
    return (jnp.square(probs_BTV).sum(-1) * valid_BT).sum()

  found, places = flatten_dict(jax.jit(jax.grad(loss))(params), sep="/"), Places(config)
  sizes, parts, first = families.sizes(config), collections.defaultdict(list), {}
  for spec in families.family_of(config).tensors(config):
    spec = dataclasses.replace(spec, offset=0.0)
    first.setdefault(spec.hf_name, spec)
    leaf = np.asarray(places.take(found, spec.leaf_name))
    parts[spec.hf_name].append(spec.to_hf(leaf, sizes))
  for name, spec in first.items():
    ours = spec.joined(parts[name], sizes)
    if name.endswith("layer_scalar"):  # which transformers does not train
      assert name not in gradients and not ours.any()
      continue
    theirs = gradients[name]
    difference = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
    assert difference <= BOUND, (name, difference)
  assert {x for x in first if not x.endswith("layer_scalar")} == set(gradients.files)
