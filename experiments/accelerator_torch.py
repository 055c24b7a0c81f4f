"""The part `trl` of accelerator.py: the same step by grpo_jax, transformers and TRL.

All start from the same random folder in the shape of Qwen2.5-0.5B. pretrained_step.py times the
steps of grpo_jax and TRL. Where TRL is not installed, only transformers is left: its `generate`,
and an update by hand of the same number of tokens. Each runs in a process of its own.

  python experiments/accelerator_torch.py FOLDER PROMPTS GROUP MAX_TOKENS DTYPE

is the process of transformers. It prints one line of JSON.
"""

import argparse
from collections.abc import Callable
import importlib.util
import json
import os
from pathlib import Path
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from accelerator_parts import Part, one_line, version_of
import pretrained_step

HERE = Path(__file__).parent
SHAPE = dict(
  vocab_size=151936,
  hidden_size=896,
  intermediate_size=4864,
  num_hidden_layers=24,
  num_attention_heads=14,
  num_key_value_heads=2,
  rope_theta=1e6,
  initializer_range=0.02,
)
PROMPT = 64  # tokens of the prompts of transformers: about as many as the word problems have
ROWS = 16  # completions that an update of transformers computes at once
STEPS = 3  # of which the first does not count


def trl(part: Part) -> None:
  """Times a step of each program, as far as it is installed."""
  missing = missing_of("torch", "transformers")
  if missing:
    part.save(skipped=missing)
    return
  prompts, group, tokens, dtype = (2, 2, 8, "float32") if part.tiny else (32, 8, 512, "bfloat16")
  part.save(
    sizes={"prompts": prompts, "group": group, "max_tokens": tokens, "dtype": dtype},
    versions={name: version_of(name) for name in ("torch", "transformers", "trl")},
  )
  with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    part.save(folder_s=make_folder(folder, part.tiny))
    job = (f"--prompts={prompts}", f"--group={group}", f"--max_tokens={tokens}", f"--dtype={dtype}")
    step = ("pretrained_step.py", f"--model={folder}", *job, f"--steps={STEPS}", "--idle=0")
    part.save(grpo_jax=line_of(*step, "--program=grpo_jax"))
    by_hand = (str(folder), str(prompts), str(group), str(tokens), dtype)
    part.save(transformers=line_of("accelerator_torch.py", *by_hand))
    missing = missing_of("trl", "datasets", "accelerate")
    accumulation = 1 if part.tiny else prompts * group // ROWS
    options = ("--program=trl", f"--accumulation={accumulation}")
    part.save(trl={"skipped": missing} if missing else line_of(*step, *options))


def missing_of(*packages: str) -> str:
  """Says which of these packages are not installed, "" if all are."""
  missing = [name for name in packages if importlib.util.find_spec(name) is None]
  return f"not installed: {', '.join(missing)}" if missing else ""


def make_folder(folder: Path, tiny: bool) -> float:
  """Writes the folder of the model. Returns the seconds that it took."""
  import transformers_folder

  start = time.perf_counter()
  text = folder / "text.jsonl"
  rows = [{"question": question, "answer": "0"} for question in pretrained_step.problems(500)]
  text.write_text("".join(json.dumps(row) + "\n" for row in rows))
  shape = {} if tiny else SHAPE
  transformers_folder.make(str(folder), str(text), "float32" if tiny else "bfloat16", **shape)
  return round(time.perf_counter() - start, 1)


def line_of(script: str, *arguments: str) -> dict[str, Any]:
  """The last line that a script of this folder prints, which is JSON, or its error."""
  command = [sys.executable, str(HERE / script), *arguments]
  done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
  try:
    return json.loads(done.stdout.splitlines()[-1])
  except (IndexError, ValueError):
    lines = done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"]
    return {"error": lines[-1][:300]}


def of_transformers(
  folder: str, prompts: int, group: int, max_tokens: int, dtype: str
) -> dict[str, float]:
  """Times `generate` in `dtype`, and an update of float32 weights that computes in `dtype`."""
  import torch

  torch.manual_seed(0)
  device = "cuda" if torch.cuda.is_available() else "cpu"
  ids = torch.randint(3, 2000, (prompts * group, PROMPT), device=device)
  rows, sample_s = sampled(load(folder, device, dtype), ids, max_tokens)
  update_s = updated(load(folder, device, "float32"), rows, dtype)
  tokens = prompts * group * max_tokens
  peak = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else 0.0
  return {
    "sample_s": round(sample_s, 3),
    "tokens": tokens,
    "tokens_per_s": round(tokens / sample_s, 1),
    "update_s": round(update_s, 3),
    "device_mb": round(peak),
  }


def load(folder: str, device: str, dtype: str) -> Any:
  """A model of the folder's shape with random weights, made on a device."""
  import torch
  import transformers

  shape = transformers.AutoConfig.from_pretrained(folder)
  with torch.device(device):
    return transformers.AutoModelForCausalLM.from_config(shape, dtype=getattr(torch, dtype))


def sampled(model: Any, ids: Any, max_tokens: int) -> tuple[Any, float]:
  """Prompts with completions that all have `max_tokens` tokens, and the time that they take."""
  import torch

  options = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0}

  def generate(tokens: int) -> torch.Tensor:
    length = {"max_new_tokens": tokens, "min_new_tokens": tokens}
    with torch.no_grad():
      return model.generate(ids, attention_mask=torch.ones_like(ids), **options, **length)

  generate(8)  # does not count
  rows: list[torch.Tensor] = []
  seconds = torch_seconds(lambda: rows.append(generate(max_tokens)), calls=1)
  return rows[0], seconds


def updated(policy: Any, rows: Any, dtype: str) -> float:
  """The time of an update of GRPO's loss without a KL, with random advantages, by AdamW."""
  import torch

  optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6)
  advantages = torch.randn(len(rows), 1, device=rows.device)
  kind, is_mixed = getattr(torch, dtype), dtype != "float32"

  def update() -> None:
    for start in range(0, len(rows), ROWS):
      part = rows[start : start + ROWS]
      with torch.autocast(rows.device.type, kind, enabled=is_mixed):
        logits = policy(part).logits[:, PROMPT - 1 : -1]
      logprobs = logits.float().log_softmax(-1).gather(-1, part[:, PROMPT:, None])[..., 0]
      ratio = (logprobs - logprobs.detach()).exp()
      loss = -(ratio * advantages[start : start + ROWS]).sum() / rows[:, PROMPT:].numel()
      loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

  update()
  return torch_seconds(update)


def torch_seconds(run: Callable[[], Any], calls: int = 2) -> float:
  """The median time of some calls."""
  import torch

  times = []
  for _ in range(calls):
    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
      torch.cuda.synchronize()
    times.append(time.perf_counter() - start)
  return statistics.median(times)


def main() -> None:
  """Times transformers in this process."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("folder", help="of the model")
  parser.add_argument("prompts", type=int)
  parser.add_argument("group", type=int, help="completions of a prompt")
  parser.add_argument("max_tokens", type=int, help="of a completion")
  parser.add_argument("dtype", help="in which it computes, such as bfloat16")
  flags = parser.parse_args()
  found: dict[str, Any]
  try:
    found = of_transformers(**vars(flags))
  except Exception as error:  # too little memory, say
    found = {"error": one_line(error)}
  print(json.dumps(found))


if __name__ == "__main__":
  main()
