"""Prints what a device holds if several share the tokens of a text: in updates and in sampling.

python experiments/context_memory.py simulated
  Compiles the update of a small model for 1, 2, 4 and 8 simulated devices of this machine.
python experiments/context_memory.py chips [--compile=reference,update]
  The shape of Qwen2.5-7B on eight chips of a TPU v5p, which need not exist: the estimate behind
  batch.micro_batch=0 and, by the compiler of jax[tpu], the named programs with mesh.context=4.
  An update compiles for many minutes. JAX_OPTIMIZATION_LEVEL=O1 makes that fewer.
python experiments/context_memory.py sampling
  One group of 8 completions of 131,072 tokens of that model on eight chips of a v5p, sampled in
  bfloat16 with several sizes of sampling.tensor and sampling.context, by the same compiler.
python experiments/context_memory.py prompts
  What computes one prompt of 65,536 tokens of that model on these chips, with several sizes of
  sampling.tensor and sampling.context, by the same compiler.
python experiments/context_memory.py long [--model=FOLDER] [--context=16]
  The update of groups of 8 completions: 131,072 tokens of that model on 64 chips of a v5p or, with
  the config.json of Qwen3.5-4B in FOLDER, 65,536 of that one on 16 chips of a v6e.
python experiments/context_memory.py ring
  A small model whose attention goes around a ring of eight chips of a v5p: which messages are on
  their way while attention computes, by the order of instructions in the compiled update.
python experiments/context_memory.py host
  A model of four layers on four chips of a TPU v5e, with learner.remat_policy=offload and without:
  what the update holds on a device and in the memory of the host, by the compiler of jax[tpu].
"""

import argparse
import contextlib
import dataclasses
import json
from pathlib import Path
import re
import tempfile

import jax
from ml_collections import ConfigDict

from grpo_jax import model
from grpo_jax.around.planning import cost
from grpo_jax.around.planning.phases import Phase, compiled, seconds_by_limit
from grpo_jax.around.planning.plan import run_of
from grpo_jax.around.planning.topologies import devices_of
from grpo_jax.config import from_dict
from grpo_jax.configs import default
from grpo_jax.model.attention import context as context_lib
from grpo_jax.model.huggingface import config_json
from grpo_jax.parallel.chips import chip_of
from grpo_jax.run.memory import sampler_bytes
from grpo_jax.run.run import Run
from grpo_jax.run.stages import programs

SMALL = dict(
  embed_dim=512,
  num_layers=8,
  num_heads=8,
  num_kv_heads=2,
  head_dim=64,
  mlp_dim=1536,
  attention="chunked",
)
QWEN = model.ModelConfig(
  vocab_size=152064,
  embed_dim=3584,
  num_layers=28,
  num_heads=28,
  num_kv_heads=4,
  head_dim=128,
  mlp_dim=18944,
  rope_theta=1e6,
  tie_embeddings=False,
  max_positions=131072,
  stop_ids=(1,),
)
LONG_QWEN = dataclasses.replace(QWEN, max_positions=163840)


def config_of(prompt_tokens: int, tokens: int, **batch: int) -> ConfigDict:
  """A config of long texts without warm start and evaluation."""
  c = default.get_config()
  c.data.max_prompt_tokens, c.sampling.max_tokens = prompt_tokens, tokens
  c.batch.update(batch)
  c.learner.remat, c.learner.remat_policy = True, "nothing_saveable"
  c.warm_start.steps = c.eval.every = 0
  return c


def phase_of(run: Run, name: str) -> Phase:
  """One program of the run, compiled."""
  (program,) = [program for program in programs(run) if program.name == name]
  return compiled(program)


def simulated() -> None:
  devices = devices_of("cpu:8", None)
  for context in (1, 2, 4, 8):
    c = config_of(2048, 8192, prompts=1, group_size=2, micro_batch=1)
    c.model.update(SMALL)
    c.mesh.update(data=1, context=context)
    run = run_of(from_dict(c.to_dict()), devices[:context])
    temporary = phase_of(run, "update").memory["temporary arrays"]
    print(f"context {context}: {temporary / 1e6:,.0f} MB of temporary arrays beside the gradient")


def chips(names: list[str]) -> None:
  jax.config.update("jax_platforms", "cpu")
  devices = devices_of("v5p:2x2x2", None)
  with tempfile.TemporaryDirectory() as folder:
    Path(folder, "config.json").write_text(json.dumps(config_json.config_to_json(QWEN)))
    for fsdp, context in ((8, 1), (4, 2), (2, 4), (1, 8)):
      c = config_of(2048, 32768, prompts=8, group_size=8, micro_batch=fsdp)
      c.model.update(path=folder, dtype="bfloat16", reference_dtype="bfloat16")
      c.sampling.dtype = "bfloat16"
      c.mesh.update(data=1, fsdp=fsdp, context=context)
      run = run_of(from_dict(c.to_dict()), devices)
      held, activations = (size / 1e9 for size in run.programs.estimate_of_update)
      print(f"fsdp {fsdp}, context {context}: {held:.1f} GB held, {activations:.1f} of activations")
      for name in names if context == 4 else ():
        phase = phase_of(run, name)
        limits = seconds_by_limit(phase.counted.whole, chip_of(devices[0]))
        seconds = ", ".join(f"{limit} {least:.1f} s" for limit, least in limits.items())
        print(f"  {name}: {phase.total / 1e9:.1f} GB in all; at least {seconds}")


def sampling() -> None:
  jax.config.update("jax_platforms", "cpu")
  devices = devices_of("v5p:2x2x2", None)
  with tempfile.TemporaryDirectory() as folder:
    Path(folder, "config.json").write_text(json.dumps(config_json.config_to_json(LONG_QWEN)))
    for tensor, context in ((8, 1), (4, 2), (2, 4), (1, 8)):
      c = config_of(2048, 131072, prompts=1, group_size=8, micro_batch=1)
      c.model.update(path=folder, dtype="bfloat16", reference_dtype="bfloat16")
      c.sampling.update(dtype="bfloat16", tensor=tensor, context=context)
      c.mesh.update(data=1, context=8)
      run = run_of(from_dict(c.to_dict()), devices)
      estimate = sampler_bytes(run.config, run.parameters.sampling.model)
      phase = phase_of(run, "sample")
      parts = ", ".join(f"{kind} {size / 1e9:.1f}" for kind, size in phase.memory.items())
      print(f"tensor {tensor}, context {context}: {estimate / 1e9:.1f} GB of cache by the estimate")
      print(
        f"  {phase.total / 1e9:.1f} GB in all: {parts}; compiled in {phase.compile_seconds:.0f} s"
      )
      if phase.counted is not None:
        limits = seconds_by_limit(phase.counted.whole, chip_of(devices[0]))
        seconds = ", ".join(
          f"{limit} {least * 1e3 / 131072:.2f} ms" for limit, least in limits.items()
        )
        print(f"  at least, for each token: {seconds}")


def prompts() -> None:
  jax.config.update("jax_platforms", "cpu")
  devices = devices_of("v5p:2x2x2", None)
  with tempfile.TemporaryDirectory() as folder:
    Path(folder, "config.json").write_text(json.dumps(config_json.config_to_json(LONG_QWEN)))
    for tensor, context in ((8, 1), (4, 2), (2, 4), (1, 8)):
      c = config_of(65536, 4096, prompts=1, group_size=8, micro_batch=1)
      c.model.update(path=folder, dtype="bfloat16", reference_dtype="bfloat16")
      c.sampling.update(dtype="bfloat16", tensor=tensor, context=context)
      c.mesh.update(data=1, context=8)
      run = run_of(from_dict(c.to_dict()), devices)
      (sample,) = [program for program in programs(run) if program.name == "sample"]
      begin = run.programs.sampler().programs.begin
      (stage,) = [stage for stage in sample.stages if stage.program is begin]
      executable = stage.lower().compile()
      memory, text = executable.memory_analysis(), executable.as_text()
      counted = cost.count(text).whole
      limits = seconds_by_limit(counted, chip_of(devices[0]))
      print(
        f"tensor {tensor}, context {context}: {memory.temp_size_in_bytes / 1e9:.2f} GB of temporary"
        f" arrays, {counted.link_bytes / 1e9:.1f} GB over links; at least "
        + ", ".join(f"{limit} {least:.2f} s" for limit, least in limits.items())
      )
      # The kernel of attention does not declare its operations. A token sees half of the others.
      shape = re.search(r"%splash_mha_fwd\S* = [^\n]*?bf16\[(\d+),(\d+),(\d+)\]", text)
      heads, tokens, head_dim = map(int, shape.groups())
      of_kernel = 2 * tokens**2 * head_dim * heads * LONG_QWEN.num_layers
      seconds = of_kernel / chip_of(devices[0]).flops
      print(f"  and {seconds:.2f} s for attention to {tokens:,} tokens with {heads} heads")


def long(model_folder: str, context: int) -> None:
  jax.config.update("jax_platforms", "cpu")
  topology, tokens = ("v6e:4x4", 65536) if model_folder else ("v5p:4x4x4", 131072)
  devices = devices_of(topology, None)
  axes = dict(fsdp=len(devices) // context, context=context)
  with contextlib.ExitStack() as stack:
    if not model_folder:
      model_folder = stack.enter_context(tempfile.TemporaryDirectory())
      text = json.dumps(config_json.config_to_json(LONG_QWEN))
      Path(model_folder, "config.json").write_text(text)
    c = config_of(2048, tokens, prompts=len(devices), group_size=8, micro_batch=axes["fsdp"])
    c.model.update(path=model_folder, dtype="bfloat16", reference_dtype="bfloat16")
    c.model.vision, c.sampling.dtype = "ignored", "bfloat16"
    c.mesh.update(data=1, **axes)
    run = run_of(from_dict(c.to_dict()), devices)
    held, activations = (size / 1e9 for size in run.programs.estimate_of_update)
    print(
      f"{topology}, {axes}: {held:.1f} GB held, {activations:.1f} of activations by the estimate"
    )
    phase = phase_of(run, "update")
  if phase.counted is None:
    print(f"does not fit: {phase.failure}")
    return
  print(f"{phase.total / 1e9:.1f} GB in all, compiled in {phase.compile_seconds:.0f} s")
  limits = seconds_by_limit(phase.counted.whole, chip_of(devices[0]))
  print("at least " + ", ".join(f"{limit} {least:.1f} s" for limit, least in limits.items()))
  print(f"a device of the {len(devices)} sends {phase.counted.whole.link_bytes / 1e9:,.0f} GB")


def ring() -> None:
  jax.config.update("jax_platforms", "cpu")
  devices = devices_of("v5p:2x2x2", None)
  context_lib.EXCHANGES = tuple(x for x in context_lib.EXCHANGES if x.name == "ring")
  c = config_of(1024, 16384, prompts=1, group_size=4, micro_batch=1)
  c.model.update(SMALL, embed_dim=1024, num_layers=2, head_dim=128, attention="auto")
  c.model.dtype = "bfloat16"
  c.mesh.update(data=1, context=8)
  run = run_of(from_dict(c.to_dict()), devices)
  (update,) = [program for program in programs(run) if program.name == "update"]
  (stage,) = update.stages
  text = stage.lower().compile().as_text()
  whole = cost.count(text).whole
  print(
    f"{whole.memory_bytes / 1e9:.0f} GB of traffic, {whole.link_bytes / 1e9:.3f} GB of messages"
  )
  for computation in text.split("\n\n"):
    # Attention of a turn is four conditionals, one for each pair of pieces.
    opcode = r"%([\w.-]+) = .*? (conditional|collective-permute-start|collective-permute-done)\("
    found = re.findall(opcode, computation)
    at = {name: place for place, (name, _) in enumerate(found)}
    attention = [place for place, (_, code) in enumerate(found) if code == "conditional"]
    pairs = re.findall(r"%([\w.-]+) = [^\n]*? collective-permute-done\(%([\w.-]+)\)", computation)
    if len(attention) < 4 or not pairs or "ENTRY" in computation.splitlines()[0]:
      continue
    print(f"a turn with {len(pairs)} messages")
    for done, start in pairs:
      beside = sum(at[start] < place < at[done] for place in attention)
      print(f"  {start} to {done}: beside {beside} of {len(attention)} parts of attention")


def host() -> None:
  jax.config.update("jax_platforms", "cpu")
  devices = devices_of("v5e:2x2", None)
  for policy in ("nothing_saveable", "offload"):
    c = config_of(512, 4096, prompts=4, group_size=4, micro_batch=4)
    c.model.update(SMALL, embed_dim=1024, num_layers=4, dtype="bfloat16")
    c.learner.remat_policy = policy
    c.mesh.update(data=1, fsdp=4)
    run = run_of(from_dict(c.to_dict()), devices)
    _, activations = run.programs.estimate_of_update
    phase = phase_of(run, "update")
    print(
      f"{policy}: an estimate of {activations / 1e9:.3f} GB of activations;"
      f" {phase.memory['temporary arrays'] / 1e9:.3f} GB of temporary arrays by the compiler,"
      f" {phase.host_bytes / 1e9:.3f} GB on the host, compiled in {phase.compile_seconds:.0f} s"
    )


WHAT = dict(simulated=simulated, sampling=sampling, prompts=prompts, ring=ring, host=host)


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("what", choices=("chips", "long", *WHAT))
  parser.add_argument("--compile", default="", help="with chips: reference, update")
  parser.add_argument("--model", default="", help="with long: a folder with a config.json")
  parser.add_argument("--context", type=int, default=16, help="with long: mesh.context")
  args = parser.parse_args()
  if args.what == "chips":
    chips([*filter(None, args.compile.split(","))])
  elif args.what == "long":
    long(args.model, args.context)
  else:
    WHAT[args.what]()


if __name__ == "__main__":
  main()
