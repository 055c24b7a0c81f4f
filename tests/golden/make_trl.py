"""Makes trl/: folders that TRL saved after training from an exported one, and greedy completions.

  python tests/golden/make_trl.py

`now` began with what grpo_jax exports. `before` began with tokenizers/words, the files that
earlier versions wrote, with a token for each character as a word. To those, transformers adds a
token <|endoftext|>, for which the model has no row.
transformers made the completions in greedy.json from the saved folders.

Made with transformers 5.23.0, trl 1.16.0 and torch 2.13.0, on one CPU. The model is that of
old_runs/fixed_reference.
"""

import json
from pathlib import Path
import shutil
import subprocess
import sys
import tarfile
import tempfile

import datasets
import torch
import transformers
import trl

from grpo_jax.data.tasks import tasks

GOLDEN = Path(__file__).parent
PROMPTS, LENGTH = 12, 10  # greedy completions, and their tokens


def export(folder):
  with (
    tempfile.TemporaryDirectory() as run,
    tarfile.open(GOLDEN / "old_runs/fixed_reference.tar.xz") as archive,
  ):
    archive.extractall(run, filter="data")
    subprocess.run(
      [
        sys.executable,
        "-m",
        "grpo_jax.export",
        f"--workdir={run}/fixed_reference",
        f"--out={folder}",
      ],
      check=True,
    )


def length(completions, **columns):
  del columns
  return [float(len(text)) for text in completions]


def train(source, out, questions):
  """Trains two steps with TRL, as a user would, and saves the model."""
  with tempfile.TemporaryDirectory() as work:
    settings = trl.GRPOConfig(
      output_dir=work,
      max_steps=2,
      per_device_train_batch_size=8,
      num_generations=4,
      max_completion_length=8,
      learning_rate=1e-3,
      report_to=[],
      save_strategy="no",
      use_cpu=True,
      bf16=False,
    )
    rows = datasets.Dataset.from_list([{"prompt": question} for question in questions])
    trainer = trl.GRPOTrainer(str(source), length, args=settings, train_dataset=rows)
    trainer.train()
    trainer.save_model(str(out))
  (out / "training_args.bin").unlink()


def greedy(folder, questions):
  tokens = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
  model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
  batch = tokens(questions, return_tensors="pt", padding=True)
  with torch.no_grad():
    ids = model.generate(**batch, max_new_tokens=LENGTH, do_sample=False)
  return tokens.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def main():
  task = tasks.arithmetic("")
  train_questions = [task.train[i]["question"] for i in range(64)]
  test_questions = [task.test[i]["question"] for i in range(PROMPTS)]
  texts = {}
  for name in ("now", "before"):
    out = GOLDEN / "trl" / name
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as parent:
      source = Path(parent) / "exported"
      export(source)
      if name == "before":
        shutil.copytree(GOLDEN / "tokenizers/words", source, dirs_exist_ok=True)
      train(source, out, train_questions)
    texts[name] = greedy(out, test_questions)
  (GOLDEN / "trl/greedy.json").write_text(json.dumps(texts, indent=1) + "\n")


if __name__ == "__main__":
  main()
