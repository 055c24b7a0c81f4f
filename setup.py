"""grpo_jax: Group Relative Policy Optimization in JAX."""

from setuptools import find_packages, setup

setup(
  name="grpo_jax",
  version="0.1.0",
  description="Group Relative Policy Optimization for language models, in JAX",
  packages=find_packages(include=["grpo_jax", "grpo_jax.*", "configs"]),
  python_requires=">=3.11",
  install_requires=[
    "absl-py",
    "array_record",  # how tensorflow-datasets reads without TensorFlow
    "flax",
    "huggingface_hub",
    "importlib_resources",  # tensorflow-datasets imports it and does not ask for it
    "jax>=0.10",
    "jinja2",
    "ml-collections",
    "numpy",
    "optax",
    "orbax-checkpoint>=0.11.36",
    "qwix",
    "rich",
    "safetensors",
    "scipy",  # jax needs it too
    "sentencepiece",
    "tensorboardX",
    "tensorflow-datasets",
    "tokenizers",
  ],
  extras_require={
    "test": [
      "hypothesis",
      "math-verify",
      "mypy==2.4.1",
      "nbformat",
      "pytest",
      "pytest-xdist",
      "ruff==0.17.6",
    ],
    "notebooks": ["ipykernel", "matplotlib", "nbclient", "nbconvert", "nbformat"],
    "mutation": ["cosmic-ray"],
    "plot": ["matplotlib"],
    "report": ["bokeh"],
    "math": ["math-verify"],
    "wandb": ["wandb"],
    "gcs": ["gcsfs"],
    "ray": ["ray"],
    "cuda": ["jax[cuda]"],
    "tpu": ["jax[tpu]"],
  },
)
