"""Moves the images of a batch's prompts, or their visual tokens, to the mesh."""

import dataclasses

from grpo_jax.data.images.batches import HostImages
from grpo_jax.data.loader import PromptBatch
from grpo_jax.run.run import Run
from grpo_jax.types import Batch, Images, Visual


def encoded_first(run: Run, prompts: PromptBatch) -> PromptBatch:
  """Encodes the images of prompts to visual tokens, if `Parameters.encodes_first`."""
  if not run.parameters.encodes_first or prompts.images is None:
    return prompts
  return dataclasses.replace(prompts, visual=_encoded(run, prompts.images))


def with_images(run: Run, batch: Batch, prompts: PromptBatch) -> Batch:
  """Adds the images of its prompts to a batch: as visual tokens if the vision tower is frozen.

  Args:
    run: The run.
    batch: The batch on the mesh.
    prompts: The prompts of the batch.
  """
  if prompts.visual is not None:  # `encoded_first` has encoded them
    return batch.replace(visual=prompts.visual)
  if prompts.images is None:
    return batch
  if run.parameters.model.has_frozen_tower:  # an update does not compute a frozen tower
    return batch.replace(visual=_encoded(run, prompts.images))
  return batch.replace(images=run.hosts.put(Images(*prompts.images)))


def _encoded(run: Run, images: HostImages) -> Visual:
  return run.encode(run.parameters.base, run.hosts.put(Images(*images)))
