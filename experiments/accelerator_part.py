"""One part of accelerator.py, in the process that has the device: `accelerator_part.py NAME`."""

import argparse
from collections.abc import Callable
import json
from pathlib import Path
import sys
import traceback

import accelerator_parts
from accelerator_parts import Part, one_line, start_device

# Parts that start processes which need the device, and so must leave it alone themselves.
WITHOUT_DEVICE = ("quick_start", "resume", "trl")


def parts() -> dict[str, Callable[[Part], None]]:
  """The functions of all parts, by name."""
  import accelerator_model
  import accelerator_torch

  return {
    "device": accelerator_parts.device,
    "quick_start": accelerator_parts.quick_start,
    "resume": accelerator_parts.resume,
    "golden": accelerator_parts.golden,
    "gap": accelerator_model.gap,
    "decode": accelerator_model.decode,
    "update": accelerator_model.update,
    "attention": accelerator_model.attention,
    "trl": accelerator_torch.trl,
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("name", help="of the part")
  parser.add_argument("--results", type=Path, required=True, help="the file to write")
  parser.add_argument("--device", type=json.loads, default={}, help="what the first part found")
  parser.add_argument("--rows", type=json.loads, default=[64, 256, 1024], help="to decode")
  parser.add_argument("--tiny", action="store_true")
  args = parser.parse_args()
  part = Part(args.results, args.tiny, args.device, args.rows)
  try:
    if args.name not in WITHOUT_DEVICE:
      part.save(start=start_device())
    parts()[args.name](part)
  except Exception as error:  # whatever fails, the other parts go on
    traceback.print_exc()
    part.save(error=one_line(error))
    sys.exit(1)


if __name__ == "__main__":
  main()
