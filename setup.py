"""grpo_jax: Group Relative Policy Optimization in JAX."""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

# What draws the pages of docs/ as a site. A new major version changes how it is configured.
SITE = ["mkdocs>=1.6,<2", "mkdocs-material>=9.7,<10", "mkdocstrings[python]>=1,<2"]


class WithRecipes(build_py):
  """Puts the recipes of configs/ into the package, where `grpo_jax.configs` finds them."""

  def run(self) -> None:
    super().run()
    if not self.editable_mode:
      for file in Path("configs").glob("[!_]*.py"):
        self.copy_file(str(file), str(Path(self.build_lib, "grpo_jax/configs", file.name)))


setup(
  cmdclass={"build_py": WithRecipes},
  name="grpo_jax",
  version="0.2.0",
  description="Group Relative Policy Optimization for language models, in JAX",
  packages=find_packages(include=["grpo_jax", "grpo_jax.*"]),
  package_data={"grpo_jax.around.reporting": ["web/*"]},
  python_requires=">=3.11",
  install_requires=[
    "absl-py>=2.1",
    "array_record>=0.7.2",  # how tensorflow-datasets reads without TensorFlow
    "flax>=0.12.6",
    "huggingface_hub>=1.0",
    "importlib_resources>=6.4",  # tensorflow-datasets imports it and does not ask for it
    "jax>=0.10.2",
    "jinja2>=3.1",
    "ml-collections>=1.0",
    "numpy>=2.1",
    "optax>=0.2.8",
    "orbax-checkpoint>=0.11.36",
    "pillow>=11",  # images of prompts
    "platformdirs>=4.14",
    "qwix>=0.1.5",
    "rich>=14.3",
    "safetensors>=0.7",
    "scipy>=1.14",  # jax needs it too
    "sentencepiece>=0.2.0",
    "tensorboardX>=2.6.2",
    "tensorflow-datasets>=4.9.10",
    "tokenizers>=0.21",
  ],
  extras_require={
    "test": [
      "aiohttp>=3.14",
      "cloudpickle",
      "gguf>=0.17",
      "hypothesis",
      "jsonschema",
      "llguidance>=1.9",
      "math-verify",
      *SITE,
      "mypy==2.4.1",
      "nbformat",
      "openai",
      "pyarrow",
      "pytest",
      "pytest-xdist",
      "reasoning-gym>=0.1.25",
      "ruff==0.17.6",
      "textarena>=0.7.4",
    ],
    "notebooks": ["cloudpickle", "ipykernel", "matplotlib", "nbclient", "nbconvert", "nbformat"],
    "docs": SITE,
    "mutation": ["cosmic-ray"],
    "plot": ["matplotlib"],
    "math": ["math-verify"],
    "workers": ["cloudpickle"],  # for reward functions of notebooks and scripts
    "parquet": ["pyarrow"],
    "gguf": ["gguf>=0.17"],
    "schema": ["jsonschema"],
    "ifeval": ["lm-eval[ifeval]>=0.4.9"],
    "judge": ["openai"],
    "serve": ["aiohttp>=3.14"],
    "reasoning-gym": ["reasoning-gym>=0.1.25"],
    "openenv": ["openenv>=0.10"],
    "verifiers": ["verifiers>=0.4"],
    "textarena": ["textarena>=0.7.4"],
    "mcp": ["mcp>=2.0"],
    "guides": ["llguidance>=1.9"],
    "wandb": ["wandb"],
    "mlflow": ["mlflow>=3"],
    "trackio": ["trackio>=0.43"],
    "swanlab": ["swanlab>=0.10"],
    "profile": ["xprof"],
    "gcs": ["gcsfs"],
    "ray": ["ray"],
    "cuda": ["jax[cuda]"],
    "tpu": ["jax[tpu]"],
  },
)
