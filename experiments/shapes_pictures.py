"""Draws images of the test with a run's greedy answers before and after GRPO.

python -m grpo_jax.train --config=configs/shapes.py --workdir=/tmp/shapes
pip install -e '.[plot]'
python experiments/shapes_pictures.py experiments/shapes_answers.png /tmp/shapes
"""

import sys

from needs import needs
import numpy as np

import grpo_jax
from grpo_jax.storage.reading import read_config

with needs("pip install -e '.[plot]'"):
  import matplotlib.pyplot as plt

SHOWN = 6


def main(picture: str, workdir: str) -> None:
  """Draws the first images of the test."""
  config = read_config(workdir)
  first = config.warm_start.steps
  before = grpo_jax.load_policy(workdir, step=first)
  after = grpo_jax.load_policy(workdir, step=first + config.steps)
  figure, axes = plt.subplots(1, SHOWN, figsize=(2.2 * SHOWN, 2.9), constrained_layout=True)
  for place, example in zip(axes, before.run.task.test[:SHOWN], strict=True):
    answers = [answer(policy, example) for policy in (before, after)]
    place.imshow(np.asarray(example["image"].image()))
    place.set_xticks([])
    place.set_yticks([])
    place.set_title(f"{example['question']} ({example['answer']})", fontsize=8)
    place.set_xlabel("before: {}\nafter: {}".format(*answers), fontsize=8)
  figure.savefig(picture, dpi=120)


def answer(policy: grpo_jax.Policy, example: dict) -> str:
  """The greedy answer to a question about an image."""
  question, image = example["question"], example["image"].image()
  return policy.sample(question, images=[image], temperature=0)[0].text


if __name__ == "__main__":
  if len(sys.argv) != 3:
    sys.exit(__doc__)
  main(*sys.argv[1:])
