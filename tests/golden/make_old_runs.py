"""Makes old_runs/: runs of an earlier version, and how that version continues them.

Run it with the package of that version, from the root of this repository. `git worktree` gives a
copy of the version:

  git worktree add ../old 1e8ca88
  PYTHONPATH=../old JAX_PLATFORMS=cpu python tests/golden/make_old_runs.py
"""

import json
from pathlib import Path
import shutil
import subprocess
import sys
import tarfile
import tempfile

from configs import default
from grpo_jax.config import from_dict
from grpo_jax.train import train

FOLDER = Path("tests/golden/old_runs")
REWARDS = FOLDER / "reward.py"  # relative, so that it is found in any checkout
RUNS = {
  # (changes, GRPO steps that the folder holds)
  "fixed_reference": ({"warm_start.steps": 3, "algo.kl_coef": 0.5}, 3),
  "warm_start_done": ({"warm_start.steps": 3, "algo.kl_coef": 0.5}, 0),
  "moving_reference": (
    {
      "algo.kl_coef": 0.5,
      "algo.kl_target": 0.01,
      "algo.kl_horizon": 64,
      "algo.ref_sync_steps": 2,
      "algo.minibatches": 2,
    },
    3,
  ),
}
MORE = 3  # GRPO steps that the expected rows are of


def config(changes, steps):
  c = default.get_config()
  c.steps = steps
  c.model.update(embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=32)
  c.batch.update(prompts=16, group_size=4)
  c.data.max_prompt_tokens, c.sampling.max_tokens = 12, 8
  c.optimizer.learning_rate = 0.01
  c.reward.functions = (f"{REWARDS}:digits",)
  c.warm_start.batch = 8
  c.eval.update(every=3, examples=20, batch=8, samples=2, function=f"{REWARDS}:even")
  c.checkpoint.update(every=0, keep=1)
  c.log.update(completions_every=0, tensorboard=False)
  c.update_from_flattened_dict(changes)
  return from_dict(c.to_dict())


def command(name, *flags):
  done = subprocess.run(
    [sys.executable, "-m", f"grpo_jax.{name}", *flags], check=True, capture_output=True, text=True
  )
  return done.stdout


def rows(workdir):
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return [
    {
      key: value
      for key, value in json.loads(line).items()
      if not key.startswith(("time/", "perf/"))
    }
    for line in lines
  ]


def main():
  for name, (changes, steps) in RUNS.items():
    scratch = Path(tempfile.mkdtemp())
    workdir = scratch / name
    train(config(changes, steps), str(workdir))
    with tarfile.open(FOLDER / f"{name}.tar.xz", "w:xz") as archive:
      archive.add(workdir, name)
    expected = {}
    if name == "fixed_reference":
      expected["evaluation"] = command("evaluate", f"--workdir={workdir}").splitlines()[1:]
      command("export", f"--workdir={workdir}", f"--out={scratch / 'exported'}")
      shutil.copy(scratch / "exported" / "model.safetensors", FOLDER / f"{name}.safetensors")
    train(config(changes, steps + MORE), str(workdir))
    expected["rows"] = rows(workdir)
    (FOLDER / f"{name}.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
  main()
