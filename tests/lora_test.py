"""LoRA adapters: what they compute, what is trained, the folders of PEFT, quantised bases."""

import dataclasses
import functools
import json
import math
from pathlib import Path
import shutil

from flax.traverse_util import flatten_dict, unflatten_dict
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

from grpo_jax import learner, model
from grpo_jax.algo import metrics as metrics_lib
from grpo_jax.algo import presets
from grpo_jax.config import Learner
from grpo_jax.model import kernels, lora
from grpo_jax.settings import ConfigError
from grpo_jax.types import Batch

GOLDEN = Path(__file__).parent / "golden"
ADAPTERS = {"qwen2_all": "qwen2_tied", "qwen2_some": "qwen2_untied", "gemma2": "families/gemma2"}
JOINED = {name: f"families/{name}" for name in ("phi3", "qwen3_5", "qwen3_next")}
ALGO = presets.preset("grpo")


def read(name):
  """(config with the adapters of a golden folder, base, adapters)."""
  config, base = model.load(GOLDEN / (ADAPTERS | JOINED)[name])
  config = dataclasses.replace(config, lora=model.load_adapter_shape(GOLDEN / "lora" / name))
  return (
    config,
    base,
    jax.tree.map(jnp.asarray, model.load_adapters(GOLDEN / "lora" / name, config)),
  )


def logits_of(config, params, base):
  """Logits of the rows in the base's golden file, 0 at padding."""
  rows = np.load(GOLDEN / base / "expected.npz")
  tokens, valid = rows["tokens"], np.arange(rows["tokens"].shape[1]) < rows["lengths"][:, None]
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  logits, _ = jax.jit(lambda p: model.forward(p, config, tokens, positions))(params)
  return np.where(valid[..., None], logits, 0)


@pytest.mark.parametrize(
  "name",
  [
    "qwen2_all",
    *(pytest.param(x, marks=pytest.mark.slow) for x in ("qwen2_some", "gemma2", *JOINED)),
  ],
)
def test_logits_are_those_of_peft(name):
  """Run `pytest -s -n 0` to print the largest differences."""
  config, base, adapters = read(name)
  expected = np.load(GOLDEN / "lora" / name / "expected.npz")["logits"]
  adapted, alone = (
    logits_of(config, params, (ADAPTERS | JOINED)[name])
    for params in (model.join(base, adapters), base)
  )
  difference = np.abs(adapted - expected).max()
  print(f"{name}: largest difference of a logit {difference:.1e}")
  assert difference <= 1e-4 and np.abs(alone - expected).max() > 0.3  # the adapters do something


@pytest.mark.slow
@pytest.mark.parametrize(
  "name", [pytest.param(x, marks=() if x == "qwen2_some" else pytest.mark.slow) for x in ADAPTERS]
)
def test_saving_writes_the_tensors_that_were_loaded(name, tmp_path):
  config, _, adapters = read(name)
  model.save_adapters(tmp_path / "out", config, adapters, "base")
  before = load_file(GOLDEN / "lora" / name / "adapter_model.safetensors")
  after = load_file(tmp_path / "out" / "adapter_model.safetensors")
  assert before.keys() == after.keys()
  assert all(np.array_equal(before[key], after[key]) for key in before)
  assert model.load_adapter_shape(tmp_path / "out") == config.lora
  # All files have the same permissions.
  assert len({file.stat().st_mode for file in (tmp_path / "out").iterdir()}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
  "name",
  ["qwen2_all", "qwen2_some", "gemma2"],
)
def test_merged_weights_compute_the_same(name, tmp_path):
  config, base, adapters = read(name)
  model.save(tmp_path / "merged", config, model.join(base, adapters))
  plain, merged = model.load(tmp_path / "merged")
  assert plain == dataclasses.replace(config, lora=None)
  ours = logits_of(config, model.join(base, adapters), ADAPTERS[name])
  # One unit in the last place of each weight moves a logit of gemma2 by 5e-5.
  bound = 1e-4 if name == "gemma2" else 5e-5
  np.testing.assert_allclose(ours, logits_of(plain, merged, ADAPTERS[name]), atol=bound)


def test_scale_by_hand():
  assert model.AdapterShape(16, 32.0, False, ("q",)).scale == 2
  assert model.AdapterShape(16, 32.0, True, ("q",)).scale == 8
  kernel = jnp.array([[1.0, 2.0], [3.0, 4.0]])
  a, b = jnp.array([[1.0], [2.0]]), jnp.array([[10.0, 0.0]])
  assert lora.merged(kernel, a, b, 0.5).tolist() == [[6, 2], [13, 4]]


PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")


@pytest.fixture(scope="module")
def fresh():
  """A config with new adapters on every projection, its base, and the adapters."""
  config, base = model.load(GOLDEN / "qwen2_tied")
  config = dataclasses.replace(config, lora=model.AdapterShape(3, 6.0, False, PROJECTIONS))
  return config, base, model.init_adapters(jax.random.key(1), config, base)


@pytest.mark.slow
def test_new_adapters_change_nothing_and_the_base_is_not_copied(fresh):
  config, base, adapters = fresh
  joined = model.join(base, adapters)
  assert np.array_equal(
    logits_of(config, joined, "qwen2_tied"), logits_of(config, base, "qwen2_tied")
  )
  leaves = flatten_dict(joined)
  assert all(leaves[path] is leaf for path, leaf in flatten_dict(base).items())
  a = adapters["layers_0"]["mlp"]["down"]["lora_a"]
  bound = 1 / math.sqrt(config.mlp_dim)
  assert a.shape == (config.num_layers, config.mlp_dim, 3)
  for of_layer in a:
    assert 0.8 * bound < jnp.abs(of_layer).max() <= bound
  assert jnp.abs(a[0] - a[1]).max() > bound  # each layer has random numbers of its own
  assert len(leaves) == len(flatten_dict(base)) + 2 * 7


def make_batch(config, P=4, G=3, S=6, T=5):
  rng = np.random.default_rng(0)

  def integers(low, high, *shape):
    return jnp.asarray(rng.integers(low, high, shape), jnp.int32)

  def normal(*shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)

  mask = (jnp.arange(T) < integers(1, T + 1, P, G)[..., None]).astype(jnp.float32)
  return Batch(
    prompts_PS=integers(0, 96, P, S),
    prompt_lengths_P=integers(1, S + 1, P),
    completions_PGT=integers(0, 96, P, G, T),
    mask_PGT=mask,
    temperature_P=jnp.ones(P),
    advantages_PGT=jnp.broadcast_to(normal(P, G, 1), (P, G, T)),
    sampler_logprobs_PGT=normal(P, G, T),
    ref_logprobs_PGT=-3 + normal(P, G, T),
  )


def update(config, trained, base, batch, algo=ALGO, micro=0, reference=None):
  """The state after one update, and its metrics. The reference is by default the base."""
  objective = learner.grpo(config, algo, Learner(logprob_chunk=64))
  optimizer = optax.sgd(1.0, momentum=0.9)
  rule = learner.UpdateRule(objective, optimizer, micro)
  step = jax.jit(functools.partial(learner.train_step, rule=rule))
  state = learner.init_state(trained, optimizer, algo)
  state, metrics = step(state, base, base if reference is None else reference, batch)
  return state, metrics_lib.reduced(metrics)


def moved(fresh):
  """Adapters whose B is not 0."""

  def add_noise(x):
    return x + 0.05 * jax.random.normal(jax.random.key(x.size), x.shape)

  return jax.tree.map(add_noise, fresh[2])


@pytest.mark.slow
@pytest.mark.parametrize("micro", [0, 1])
def test_an_update_is_the_gradient_through_the_merged_weights(fresh, micro):
  """W + scale A B gives dL/dA = scale dL/dW B^T and dL/dB = scale A^T dL/dW.

  dL/dW comes from a model without adapters.
  """
  config, base, _ = fresh
  adapters, batch, plain = moved(fresh), make_batch(config), dataclasses.replace(config, lora=None)
  state, metrics = update(config, adapters, base, batch, micro=micro)
  leaves, flat = flatten_dict(adapters, sep="/"), flatten_dict(base, sep="/")
  merge = functools.partial(lora.merged, scale=config.lora.scale)
  merged = {
    name: model.per_layer(merge, name)(
      x, *(leaves.get(name.replace("kernel", n)) for n in ("lora_a", "lora_b"))
    )
    for name, x in flat.items()
  }
  whole = unflatten_dict(merged, sep="/")
  plain_state, plain_metrics = update(plain, whole, None, batch)
  assert metrics["loss"] == pytest.approx(float(plain_metrics["loss"]), abs=1e-5)
  dW = flatten_dict(jax.tree.map(np.subtract, whole, plain_state.params), sep="/")
  ours = flatten_dict(jax.tree.map(np.subtract, adapters, state.params), sep="/")
  for name, x in ours.items():
    parent, which = name.rsplit("/", 1)
    a, b, d = leaves[parent + "/lora_a"], leaves[parent + "/lora_b"], dW[parent + "/kernel"]
    inputs = a.ndim - 2  # of one layer

    def to_a(d, b, inputs=inputs):
      return np.tensordot(d, b, (tuple(range(inputs, d.ndim)), tuple(range(1, b.ndim))))

    def to_b(d, a, inputs=inputs):
      return np.tensordot(a, d, (tuple(range(inputs)), tuple(range(inputs))))

    of_layers = map(to_a, d, b) if which == "lora_a" else map(to_b, d, a)
    expected = np.stack([*of_layers])
    np.testing.assert_allclose(x, config.lora.scale * expected, atol=2e-5, err_msg=name)
    assert np.abs(x).max() > 1e-5


@pytest.mark.slow
def test_only_adapters_are_trained(fresh):
  config, base, adapters = fresh
  state, _ = update(config, adapters, base, make_batch(config))
  count = sum(x.size for x in jax.tree.leaves(adapters))
  assert sum(x.size for x in jax.tree.leaves((state.params, state.opt_state))) == 2 * count
  assert jax.tree.structure(state.params) == jax.tree.structure(adapters)


@pytest.mark.slow
def test_the_reference_is_the_base_alone(fresh):
  """KL(policy || base), computed in the update, is 0 only with new adapters."""
  config, base, adapters = fresh
  algo, batch = dataclasses.replace(ALGO, kl="full"), make_batch(config)
  assert update(config, adapters, base, batch, algo)[1]["kl"] == pytest.approx(0, abs=1e-6)
  assert update(config, moved(fresh), base, batch, algo)[1]["kl"] > 1e-3


@pytest.mark.slow
def test_a_reference_may_have_its_own_adapters(fresh):
  """KL(policy || base with the same adapters) is 0."""
  config, base, _ = fresh
  algo, batch = dataclasses.replace(ALGO, kl="full"), make_batch(config)
  adapters = moved(fresh)
  reference = model.join(base, adapters)
  _, metrics = update(config, adapters, base, batch, algo, reference=reference)
  assert metrics["kl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
  "dtype, bound",
  [("int8", 0.01), pytest.param("int4", 0.16, marks=pytest.mark.slow), ("nf4", 0.16)],
)
def test_a_quantised_kernel(dtype, bound):
  """The largest error relative to the largest weight of a tile.

  It is half a step: 1 / 127 / 2 for int8, 1 / 7 / 2 for int4, and at most .15 for nf4.
  """
  kernel = jax.random.normal(jax.random.key(0), (128, 2, 8))
  packed = model.quantised("layers_0/attention/q/kernel", kernel, dtype)
  assert (
    packed.qvalue.shape == kernel.shape
    and packed.scale.shape == (2, 2, 8)
    and packed.scale.dtype == jnp.bfloat16
  )
  assert packed.qvalue.dtype.itemsize == 1
  error = jnp.abs(kernels.dequantised(packed, jnp.float32) - kernel).reshape(2, 64, 2, 8).max(1)
  assert (error / jnp.abs(kernel).reshape(2, 64, 2, 8).max(1)).max() < bound
  for name, x in (
    ("embed/embedding", kernel[:, 0]),
    ("head/kernel", kernel[:, 0]),
    ("layers_0/attention/q/bias", kernel[0]),
  ):
    assert model.quantised(name, x, dtype).dtype == jnp.bfloat16
  assert model.quantised("final_norm/scale", kernel[0, 0], dtype).dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "nf4"])
def test_adapters_learn_on_a_quantised_base(fresh, dtype, tmp_path):
  """`save` merges the adapters into the rounded base, so it writes the policy that was trained."""
  config, base, _ = fresh

  def quantised(path, x):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return model.per_layer(lambda layer: model.quantised(name, layer, dtype), name)(x)

  rounded, adapters = jax.tree_util.tree_map_with_path(quantised, base), moved(fresh)
  state, metrics = update(config, adapters, rounded, make_batch(config))
  assert metrics["grad_norm"] > 0 and metrics["skipped_updates"] == 0
  assert all(
    jnp.abs(a - b).max() > 0
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(adapters))
  )
  model.save(tmp_path / "out", config, model.join(rounded, adapters))
  plain, merged = model.load(tmp_path / "out")
  ours = logits_of(config, model.join(rounded, adapters), "qwen2_tied")
  np.testing.assert_allclose(ours, logits_of(plain, merged, "qwen2_tied"), atol=5e-5)


# --- Refusals ---


@pytest.fixture
def folder(tmp_path):
  return Path(shutil.copytree(GOLDEN / "lora" / "qwen2_some", tmp_path / "adapter"))


@pytest.mark.parametrize(
  "fields, words",
  [
    (dict(peft_type="IA3"), "peft_type is 'IA3'"),
    (dict(use_dora=True), "use_dora is True"),
    (dict(bias="all"), "bias is 'all'"),
    (dict(init_lora_weights="pissa"), "init_lora_weights is 'pissa': .* convert the adapter with"),
    (dict(init_lora_weights="pissa_niter_4"), "init_lora_weights is 'pissa_niter_4'"),
    (dict(init_lora_weights=["olora"]), "init_lora_weights is"),
    (dict(rank_pattern={"q_proj": 2}), "rank_pattern is"),
    (dict(r=0), "r is 0"),
    (dict(modules_to_save=["lm_head"]), "modules_to_save"),
    (dict(target_modules="q.*"), "target_modules"),
    (dict(target_modules=["q_proj", "lm_head"]), "target_modules"),
    (dict(something_new=1), "something_new is 1"),
    (dict(lora_alpha=None), "lora_alpha is None"),
    (dict(lora_alpha=10**400), "lora_alpha is 1000"),
  ],
)
def test_another_kind_of_adapter_is_refused_by_name(folder, fields, words):
  file = folder / "adapter_config.json"
  file.write_text(json.dumps(json.loads(file.read_text()) | fields))
  with pytest.raises(ConfigError, match=rf"adapter_config\.json: {words}") as error:
    model.load_adapter_shape(folder)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal"])
def test_the_first_values_of_an_adapter_do_not_matter_later(init, folder):
  expected = model.load_adapter_shape(folder)
  file = folder / "adapter_config.json"
  file.write_text(json.dumps(json.loads(file.read_text()) | {"init_lora_weights": init}))
  assert model.load_adapter_shape(folder) == expected


ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
  "targets",
  [
    # As PEFT 0.21 writes all-linear for a model of up to 20 modules.
    [f"model.layers.{i}.self_attn.{x}" for i in range(2) for x in ATTENTION]
    + [f"model.layers.{i}.mlp.{x}" for i in range(2) for x in MLP],
    [*(f"self_attn.{x}" for x in ATTENTION), *MLP],
    "all-linear",
    r".*\.(self_attn|mlp)\.\w+_proj",
  ],
)
def test_modules_may_be_named_in_every_way_that_peft_writes(targets, tmp_path):
  folder = Path(shutil.copytree(GOLDEN / "lora" / "qwen2_all", tmp_path / "adapter"))
  expected = model.load_adapter_shape(folder)
  file = folder / "adapter_config.json"
  file.write_text(json.dumps(json.loads(file.read_text()) | {"target_modules": targets}))
  assert model.load_adapter_shape(folder) == expected


@pytest.mark.parametrize(
  "targets, words",
  [
    (["model.layers.0.self_attn.q_proj", "x_proj"], "no adapter of 'x_proj'"),
    ([], "must be a list of modules"),
    ([3], "must be a list of modules"),
    ("(", "no regular expression"),
  ],
)
def test_modules_that_have_no_adapter_are_named(folder, targets, words):
  file = folder / "adapter_config.json"
  file.write_text(json.dumps(json.loads(file.read_text()) | {"target_modules": targets}))
  with pytest.raises(ConfigError, match=f"target_modules is .*{words}"):
    model.load_adapter_shape(folder)


def test_adapters_of_some_layers_only_are_refused(folder):
  file = folder / "adapter_model.safetensors"
  tensors = {name: x for name, x in load_file(file).items() if ".layers.1." not in name}
  save_file(tensors, file)
  config = model.load_config(GOLDEN / "qwen2_untied")
  config = dataclasses.replace(config, lora=model.load_adapter_shape(folder))
  with pytest.raises(ConfigError, match="is missing: .* with adapters of all layers"):
    model.check_adapters(folder, config)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_file_is_named(folder, name):
  (folder / name).unlink()
  with pytest.raises(
    ConfigError,
    match=rf"^config key lora.path: .*{name} is missing: name a folder of adapters that PEFT saved",
  ):
    model.load_adapter_shape(folder)


@pytest.mark.parametrize(
  "change, words",
  [
    (
      lambda t: t | {"base_model.model.model.norm.lora_A.weight": np.ones((3, 3), np.float32)},
      "norm.lora_A.weight is not of",
    ),
    (
      lambda t: {k: v for k, v in t.items() if "layers.1.mlp.down_proj.lora_A" not in k},
      "down_proj.lora_A.weight is missing",
    ),
    (
      lambda t: {k: v[:, :-1].copy() if "q_proj.lora_A" in k else v for k, v in t.items()},
      "it is the adapter of another one",
    ),
  ],
)
def test_tensors_that_do_not_fit_are_named(folder, change, words):
  file = folder / "adapter_model.safetensors"
  save_file(change(load_file(file)), file)
  config = dataclasses.replace(
    model.load_model_config(GOLDEN / "qwen2_untied"), lora=model.load_adapter_shape(folder)
  )
  with pytest.raises(ConfigError, match=words):
    model.load_adapters(folder, config)


def test_a_projection_that_the_model_does_not_have_is_named():
  """In a model whose layers all have experts, there is no MLP to adapt."""
  config, base = model.load(GOLDEN / "families" / "qwen3_moe")

  def with_targets(*targets):
    return dataclasses.replace(config, lora=model.AdapterShape(2, 2.0, False, targets))

  with pytest.raises(ConfigError, match="lora.targets: the model has no projection gate_proj"):
    model.init_adapters(jax.random.key(0), with_targets("q", "gate"), base)
  adapters = model.init_adapters(jax.random.key(0), with_targets("q", "o"), base)
  assert len(flatten_dict(adapters)) == 4
  assert {len(x) for x in jax.tree.leaves(adapters)} == {config.num_layers}


@pytest.mark.parametrize("inputs", [pytest.param(32, marks=pytest.mark.slow), 128])
@pytest.mark.parametrize("dtype", ["int8", "int4", "nf4", "rounded"])
def test_factors_multiply_to_the_dequantised_kernel(dtype, inputs):
  """Also where the inputs are one tile, so that every dtype has one scale for each output."""
  name, kernel = "layers_0/mlp/gate/kernel", jax.random.normal(jax.random.key(0), (inputs, 48))
  small = lora.rounded(name, kernel) if dtype == "rounded" else lora.quantised(name, kernel, dtype)
  matrix_IO, scale_O = kernels.factors(small, jnp.float32, 48)
  product = matrix_IO if scale_O is None else matrix_IO * scale_O
  np.testing.assert_allclose(product, kernels.dequantised(small, jnp.float32), atol=1e-6)
  assert 0 < jnp.abs(product - kernel).max() < 0.5
