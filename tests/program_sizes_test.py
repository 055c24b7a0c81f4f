"""The programs of four recipes do not grow unseen, in instructions, operations or bytes.

The recipes have small models here, and the numbers are those of XLA's compiler for CPUs. A change
that pays may raise a number: put the new one here, and say in experiments/LOG.md what it buys.
`python tests/program_sizes_test.py` prints the table as it is.
"""

import importlib
from pathlib import Path

import jax
import pytest

from grpo_jax.around.planning import plan
from grpo_jax.around.planning.cost import count, hlo
from grpo_jax.around.planning.plan import shape_alone
from grpo_jax.config import KEEPS_PRODUCTS, from_dict
from grpo_jax.run.stages import programs

FAMILIES = Path(__file__).parent / "golden" / "families"
RECIPES = {  # the folder of a small model of the family that the recipe is for
  "arithmetic": "",
  "gsm8k": "qwen2_window",
  "moe": "qwen3_moe",
  "qwen3_5": "qwen3_5",
}
MEASURED_WITH = "0.10.2"  # of jax. Other versions fuse otherwise
# Instructions, MFLOP and MB of each program, loops as often as they run where that is known.
SIZES = {
  "arithmetic": {
    "warm start": (4929, 7016.74, 1422.03),
    "sample": (6239, 473.26, 175.28),
    "reference": (1242, 480.92, 94.34),
    "update": (6704, 1442.76, 324.92),
    "evaluate": (6136, 144.3, 70.25),
  },
  "gsm8k": {
    "sample": (6985, 98.94, 71.65),
    "reference": (1397, 106.77, 51.53),
    "update": (9941, 357.48, 189.75),
    "evaluate": (6865, 28.94, 20.98),
  },
  "moe": {
    "sample": (8706, 222.95, 110.08),
    "update": (10099, 226.2, 95.99),
    "evaluate": (8616, 67.12, 35.81),
  },
  "qwen3_5": {
    "sample": (13336, 195.27, 150.88),
    "reference": (4473, 1863.67, 416.76),
    "update": (22730, 4468.75, 1271.3),
    "evaluate": (13357, 61.8, 46.29),
  },
}
MARGIN = 1.02


def found(recipe):
  """The sizes of a recipe's programs."""
  config = importlib.import_module(f"configs.{recipe}").get_config()
  config.batch.update(prompts=8, group_size=4, micro_batch=2)
  config.data.max_prompt_tokens, config.sampling.max_tokens = 16, 48
  config.eval.batch, config.mesh = 8, dict(data=1, fsdp=1, tensor=1, expert=1, sampler=0)
  if recipe == "gsm8k":  # as on its chip: on a CPU, `auto` keeps the inputs of layers alone
    config.learner.remat_policy = KEEPS_PRODUCTS
  if RECIPES[recipe]:
    config.model.path, config.data.path = str(FAMILIES / RECIPES[recipe]), "no data is read"
  config = shape_alone(from_dict(config.to_dict()))
  run = plan.run_of(config, jax.devices()[:1])
  return {program.name: _sizes(program) for program in programs(run)}


def _sizes(program):
  instructions = flops = moved = 0
  for stage in program.stages:
    text = stage.lower().compile().as_text()
    instructions += sum(len(x.instructions) for x in hlo.parse(text).computations.values())
    whole = count(text, stage.rounds).whole
    flops, moved = flops + whole.flops, moved + whole.memory_bytes
  return instructions, round(flops / 1e6, 2), round(moved / 1e6, 2)


@pytest.mark.slow
@pytest.mark.skipif(jax.__version__ != MEASURED_WITH, reason="the numbers are of another compiler")
@pytest.mark.parametrize("recipe", RECIPES)
def test_programs_have_not_grown(recipe):
  now, then = found(recipe), SIZES[recipe]
  assert now.keys() == then.keys()
  larger = {
    name: f"{sizes} was {then[name]}"
    for name, sizes in now.items()
    if any(x > MARGIN * y for x, y in zip(sizes, then[name], strict=True))
  }
  assert not larger, "instructions, MFLOP and MB of programs that have grown"


if __name__ == "__main__":
  for name in RECIPES:
    print(f"  {name!r}: {found(name)},", flush=True)
