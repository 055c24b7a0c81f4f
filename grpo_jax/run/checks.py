"""Checks a config before anything is built.

The range of each setting is defined with the setting. This module checks combinations of settings.
Checks of the section `algo` are in `grpo_jax/algo/checks.py`, and checks that need the model or the
devices in `device_checks.py`.
"""

import dataclasses
import re
from typing import Any

from grpo_jax.algo.advantages import ADVANTAGES
from grpo_jax.algo.checks import check_algo
from grpo_jax.algo.ratios import RATIOS
from grpo_jax.config import Config, Sampling
from grpo_jax.data.tasks.exams import entries_of
from grpo_jax.data.tasks.mixture import mixture_of, sources_of
from grpo_jax.rewards import dispatch, plugins
from grpo_jax.sampler.filters import BUILT_IN, has_filters
from grpo_jax.settings import LARGEST_INT, ConfigError, address_of, check_ranges, is_url

_MOST_STOPS_OF_SGLANG = 32  # stop texts in a request


def check_config(config: Config) -> None:
  """Raises ConfigError at the first invalid value.

  Plugins are loaded first, because other values may be names that they register.
  """
  plugins.load(config.plugins)
  check_ranges(config)
  config = corrected(config)  # the checks must see the correction with which the run computes
  _check_batch(config)
  sampling = config.sampling
  check_algo(
    config.algo,
    prompts=config.batch.prompts,
    group_size=config.batch.group_size,
    max_tokens=sampling.max_tokens,
    sampler_filters=has_filters(sampling),
  )
  _check_guided(config)
  if sampling.min_tokens > sampling.max_tokens:
    raise ConfigError(
      f"config key sampling.min_tokens is {sampling.min_tokens}: sampling.max_tokens is"
      f" {sampling.max_tokens}, so no completion could end by itself"
    )
  sources = [source.name for source in sources_of(mixture_of(config.data))]
  reward = config.reward
  dispatch.check_tasks(reward.tasks, reward.functions, sources, config.eval.function)
  entries_of(config.eval.tasks)  # raises ConfigError for an invalid entry
  environment = config.environment
  if "environment" in reward.functions and not environment.has_messages:
    raise ConfigError(
      "config key reward.functions names environment, the sum of the rewards that an environment"
      " gives, and environment.name is ''; name one, or a harness"
    )
  if environment.harness and environment.name:
    raise ConfigError(
      f"config key environment.harness is {environment.harness!r}: it plays whole conversations, so"
      " environment.name is not used; leave it empty"
    )
  _require(
    not (config.learner.router_replay and environment.harness),
    "learner.router_replay",
    True,
    f"environment.harness is {environment.harness!r}, whose endpoint keeps no experts; set False",
  )
  _require(
    sampling.context == 1 or not environment.harness,
    "sampling.context",
    sampling.context,
    f"environment.harness is {environment.harness!r}, whose endpoint does not split the slots"
    " of a row; set 1",
  )
  _check_branches(config)
  _check_rollout(config)
  _check_lora(config)
  _check_reference(config)
  _check_sizes(config)
  if not config.model.path:
    _check_shape(config)


def corrected(config: Config) -> Config:
  """The config of a run with an engine, with algo.correction switched on.

  It corrects the difference between the engine's log-probs and the learner's, with the bound
  rollout.engine_correction. The config does not change without an engine, with a bound of 0, or if
  the user has chosen a correction.
  """
  algo, high = config.algo, config.rollout.engine_correction
  if not config.rollout.engine or algo.has_correction or not high:
    return config
  # A ratio that all tokens of a row share needs a correction that they share, too.
  level = "geometric" if RATIOS[algo.ratio].shared_by_row else algo.correction_level
  # With several updates of a batch, the correction must use the policy before the first update.
  old = algo.old_logprobs if algo.old_is_policy else "recomputed"
  changes: dict[str, Any] = dict(
    correction="truncate", correction_high=high, correction_level=level, old_logprobs=old
  )
  return dataclasses.replace(config, algo=dataclasses.replace(algo, **changes))


def _check_guided(config: Config) -> None:
  """Raises ConfigError for settings that conflict with sampling.regex or sampling.banned."""
  sampling = config.sampling
  _require(
    all(sampling.banned), "sampling.banned", sampling.banned, "an empty text is in every completion"
  )
  for name in ("regex", "banned"):
    value = getattr(sampling, name)
    _require(
      not value or not config.environment.has_turns,
      f"sampling.{name}",
      value,
      "completions with tools or an environment have several turns; leave one of them out",
    )
  # Settings that also say when a completion may end, with the values that switch them off.
  off_values = {"min_tokens": 0, "stop": (), "stop_ids": ()}
  for name, off in off_values.items():
    _require(
      not sampling.regex or not getattr(sampling, name),
      "sampling.regex",
      sampling.regex,
      f"it says when a completion may end; set sampling.{name}={off}",
    )
  without_escapes = re.sub(r"(?s)\\.", "_", sampling.regex)  # an escaped ( opens no group
  _require(
    not re.search(r"\(\?\w*x", without_escapes),
    "sampling.regex",
    sampling.regex,
    "the flag x, of comments and blanks, is not read; write the expression without it",
  )


def _check_branches(config: Config) -> None:
  """Raises ConfigError for settings that conflict with environment.branches above 1."""
  algo, branches = config.algo, config.environment.branches
  if branches == 1:
    return
  key = f"config key environment.branches is {branches}"
  if not config.environment.harness:
    raise ConfigError(f"{key}: only the calls of environment.harness have branches; set 1")
  if ADVANTAGES[algo.advantage].per_token or algo.kl_in_reward:
    raise ConfigError(
      f"{key}: all branches of a completion have its advantage, so algo.advantage must be one of"
      " whole completions, and algo.kl_in must be loss"
    )
  if algo.kl_target:
    raise ConfigError(f"{key}: algo.kl_target must be 0, because it knows no branches")


def _check_rollout(config: Config) -> None:
  """Raises ConfigError for settings that conflict with sampling ahead of the learner."""
  algo, rollout = config.algo, config.rollout
  if rollout.max_staleness:
    key, value = "rollout.max_staleness", rollout.max_staleness
    _require(
      algo.compares_with_sampler or algo.old_logprobs == "sampler",
      key,
      value,
      "log-probs that are computed again are those of a newer policy than the one that drew; set"
      " algo.old_logprobs='sampler', or an algo.correction as in the preset areal",
    )
  _require(
    rollout.weights != "in_flight" or rollout.max_staleness,
    "rollout.weights",
    rollout.weights,
    "it needs rollout.max_staleness above 0; set 'fixed'",
  )
  ahead = (
    "mesh.sampler above 0, rollout.listen or rollout.engine, and rollout.max_staleness above 0"
  )
  # With an engine, a replay learns from the completions of the file, whatever weights drew them.
  replayed = f"rollout.engine as in the run that wrote the file, or {ahead}"
  # (key, whether its value needs no sampling ahead, what it needs otherwise, a value without needs)
  for name, is_allowed, needed, off in (
    ("weights", rollout.weights != "newest", ahead, "fixed"),
    ("replay", not rollout.replay or bool(rollout.engine), replayed, ""),
  ):
    _require(
      is_allowed or (rollout.max_staleness and not config.samples_in_turn),
      f"rollout.{name}",
      getattr(rollout, name),
      f"it needs {needed}; set {off!r}",
    )
  _require(
    not rollout.replay or rollout.weights != "fixed" or rollout.engine,
    "rollout.replay",
    rollout.replay,
    "fixed weights have no schedule; set rollout.weights as in the run that wrote it",
  )
  _require(
    rollout.weights != "in_flight" or not config.environment.harness,
    "rollout.weights",
    rollout.weights,
    "the endpoint of environment.harness keeps its weights for a batch; set 'newest'",
  )
  _check_sampler_processes(config)
  _check_engine(config)


def _check_engine(config: Config) -> None:
  """Raises ConfigError for settings that an external engine does not support."""
  rollout, sampling = config.rollout, config.sampling
  if not rollout.engine:
    for name, given in (
      ("rollout.engine_urls", rollout.engine_urls),
      ("rollout.engine_restart", rollout.engine_restart),
      ("eval.engine", config.eval.engine),
    ):
      _require(not given, name, given, "it needs rollout.engine='vllm' or 'sglang'")
    return
  urls = rollout.engine_urls  # a replay asks no server
  _require(urls or rollout.replay, "rollout.engine_urls", urls, "name the servers of the engine")
  for url in urls:
    _require(is_url(url), "rollout.engine_urls", urls, "write each as http://HOST:PORT")
  _require(len({*urls}) == len(urls), "rollout.engine_urls", urls, "it names a server twice")
  for name in (*BUILT_IN, "filters", "min_tokens", "regex", "banned"):
    default = getattr(Sampling(), name)
    _require(
      getattr(sampling, name) == default,
      f"sampling.{name}",
      getattr(sampling, name),
      "an engine returns log-probs before or after its filters, and the learner needs both; with"
      f" rollout.engine set {default}",
    )
  _require(
    rollout.engine != "sglang" or len(sampling.stop) <= _MOST_STOPS_OF_SGLANG,
    "sampling.stop",
    sampling.stop,
    f"SGLang takes at most {_MOST_STOPS_OF_SGLANG} texts",
  )
  is_rslora = rollout.engine == "sglang" and config.lora.rank > 0 and config.lora.rslora
  # (key, value, the value that it must have, why).
  refused: tuple[tuple[str, Any, Any, str], ...] = (
    ("rollout.listen", rollout.listen, "", "the engine takes the place of sampler processes"),
    ("mesh.sampler", config.mesh.sampler, 0, "the engine has devices of its own"),
    ("environment.harness", config.environment.harness, "", "its endpoint samples in the run"),
    ("sampling.weights_dtype", sampling.weights_dtype, "", "weights are written as they are"),
    ("sampling.cache_dtype", sampling.cache_dtype, "", "the engine's own options choose it"),
    ("learner.router_replay", config.learner.router_replay, False, "an engine keeps no experts"),
    ("lora.rslora", is_rslora, False, "SGLang scales adapters by alpha / rank"),
    ("eval.engine", config.eval.engine and config.eval.tasks != (), False, "exams have own limits"),
  )
  for key, value, off, why in refused:
    _require(value == off, key, value, f"{why}; with rollout.engine set {off!r}")
  _require(
    rollout.weights != "in_flight",
    "rollout.weights",
    rollout.weights,
    "with rollout.engine one version of the weights draws a whole completion, because a server does"
    " not say which of its tokens came before new weights; set 'fixed' or 'newest'",
  )
  _require(
    config.model.path, "model.path", "", "the servers of rollout.engine need a folder to start from"
  )
  _require(
    rollout.engine_folder or not rollout.engine_restart,
    "rollout.engine_restart",
    True,
    "name the folder of the weights as rollout.engine_folder, which its servers look into",
  )
  _require(
    not (config.lora.rank and rollout.engine_restart),
    "rollout.engine_restart",
    True,
    "adapters are loaded under a new name each time, which needs no restart; set False",
  )


def _check_sampler_processes(config: Config) -> None:
  """Raises ConfigError for settings that sampler processes do not support."""
  rollout, prompts = config.rollout, config.batch.prompts
  _require(
    prompts % rollout.samplers == 0 and (rollout.listen or rollout.samplers == 1),
    "rollout.samplers",
    rollout.samplers,
    f"it must divide batch.prompts = {prompts}, and be 1 without rollout.listen",
  )
  _require(
    rollout.certificate_file or not rollout.key_file,
    "rollout.key_file",
    rollout.key_file,
    "name the certificate of this key in rollout.certificate_file",
  )
  if not rollout.listen:
    return
  address_of(rollout.listen, "config key rollout.listen")
  for holds, why in (
    (not config.mesh.sampler, "sampler processes take the place of mesh.sampler; set that to 0"),
    (
      not config.environment.harness,
      "the endpoint of a harness samples in the process of the run; set environment.harness=''",
    ),
    (rollout.weights != "in_flight", "set rollout.weights to 'fixed' or 'newest'"),
  ):
    _require(holds, "rollout.listen", rollout.listen, why)


def _require(holds: Any, key: str, value: Any, why: str) -> None:
  """Raises ConfigError, with `why` as the end of the message, if `holds` is false."""
  if not holds:
    raise ConfigError(f"config key {key} is {value!r}: {why}")


def _check_batch(config: Config) -> None:
  """Raises ConfigError for settings of batches, data and rewards that conflict with each other."""
  batch, reward, data = config.batch, config.reward, config.data
  minibatches = max(1, config.algo.minibatches)
  prompts_of_update = batch.prompts // minibatches
  if batch.micro_batch:
    divided_by = " / algo.minibatches" if minibatches > 1 else ""
    _require(
      prompts_of_update % batch.micro_batch == 0,
      "batch.micro_batch",
      batch.micro_batch,
      f"it must divide batch.prompts{divided_by} = {prompts_of_update}",
    )
  _require(
    all(config.sampling.stop),
    "sampling.stop",
    config.sampling.stop,
    "an empty text would end every completion at its first token",
  )
  _require(
    data.chat or not data.system,
    "data.system",
    data.system,
    "a prompt that is not a conversation has no system message; set data.chat=True, or write it"
    " into data.prompt",
  )
  _require(
    data.chat or not data.chat_template_kwargs,
    "data.chat_template_kwargs",
    data.chat_template_kwargs,
    "a prompt that is not a conversation has no chat template; set data.chat=True, or leave it out",
  )
  _require(
    data.chat or not data.few_shot,
    "data.few_shot",
    data.few_shot,
    "a prompt that is not a conversation has no earlier messages; set data.chat=True, or write them"
    " into data.prompt",
  )
  _require(
    len(data.few_shot) % 2 == 0,
    "data.few_shot",
    data.few_shot,
    "after each text of the user, it must hold the assistant's answer",
  )
  _require(
    reward.step_separator, "reward.step_separator", "", "it must hold at least one character"
  )
  _require(
    len(reward.weights) == len(reward.functions) >= 1,
    "reward.weights",
    reward.weights,
    f"it must hold one number for each of reward.functions = {reward.functions}, and there must be"
    " at least one",
  )


def _check_lora(config: Config) -> None:
  """Raises ConfigError for settings that are invalid for adapters, or conflict with them."""
  lora, algo = config.lora, config.algo
  if not lora.rank:
    _require(not lora.path, "lora.path", lora.path, "set lora.rank to the rank of its adapters")
    return
  _require(lora.targets, "lora.targets", lora.targets, "name at least one projection")
  from grpo_jax.model import (
    ADAPTABLE,  # here, because a run without adapters is checked without jax
  )

  choices = ", ".join(map(repr, ADAPTABLE))
  for name in lora.targets:
    _require(name in ADAPTABLE, "lora.targets", name, f"choose one of {choices}")
  _require(
    config.model.path,
    "lora.rank",
    lora.rank,
    "adapters need the weights of a checkpoint under them; set model.path",
  )
  _require(
    not config.warm_start.steps,
    "warm_start.steps",
    config.warm_start.steps,
    "with lora.rank the frozen weights are the reference: warm-start without adapters, export, and"
    " give that folder as model.path",
  )
  _require(
    not config.learner.router_bias_rate,
    "learner.router_bias_rate",
    config.learner.router_bias_rate,
    "with lora.rank the biases of routers are frozen; set 0",
  )
  _require(
    not algo.ref_sync_steps or algo.ref_mixup == 1,
    "algo.ref_mixup",
    algo.ref_mixup,
    "a mixture of the factors of two adapters is not a mixture of their weights; with lora.rank"
    " choose 1",
  )


def _check_reference(config: Config) -> None:
  algo, dtype = config.algo, config.model.reference_dtype
  moves_gradually = algo.ref_sync_steps and algo.ref_mixup < 1
  _require(
    dtype == "float32" or not moves_gradually,
    "model.reference_dtype",
    dtype,
    f"a reference that moves by algo.ref_mixup = {algo.ref_mixup} would lose small changes to"
    " rounding; set 'float32', algo.ref_mixup=1 or algo.ref_sync_steps=0",
  )


def _check_sizes(config: Config) -> None:
  """Raises ConfigError if a count exceeds an int32, or log.profile ends after the last step."""
  steps = config.warm_start.steps + config.steps * config.algo.updates_per_step
  _require(
    steps <= LARGEST_INT,
    "steps",
    config.steps,
    f"with warm_start.steps and the updates of a step that makes {steps} updates, of at most"
    f" {LARGEST_INT}",
  )
  profile, last = config.log.profile, config.warm_start.steps + config.steps  # (first, last step)
  _require(
    not profile or profile[1] <= last,
    "log.profile",
    profile,
    f"the run has {last} steps, those of the warm start included",
  )
  # The tokens of a batch are counted in int32.
  row_tokens = config.data.max_prompt_tokens + config.sampling.max_tokens
  for key, value, rows in (
    ("batch.prompts", config.batch.prompts, config.batch.prompts * config.batch.group_size),
    ("warm_start.batch", config.warm_start.batch, config.warm_start.batch),
    # With eval.samples = 0, an evaluation draws only one greedy completion of each prompt.
    ("eval.batch", config.eval.batch, config.eval.batch * max(1, config.eval.samples)),
  ):
    _require(
      rows * row_tokens <= LARGEST_INT,
      key,
      value,
      f"that makes a batch of {rows} rows of up to {row_tokens} tokens; {LARGEST_INT} tokens fit",
    )


def _check_shape(config: Config) -> None:
  shape = config.model
  _require(
    shape.num_heads % shape.num_kv_heads == 0,
    "model.num_heads",
    shape.num_heads,
    f"it must be a multiple of model.num_kv_heads = {shape.num_kv_heads}",
  )
  _require(
    shape.head_dim % 2 == 0,
    "model.head_dim",
    shape.head_dim,
    "rotary embeddings turn pairs: it must be even",
  )
