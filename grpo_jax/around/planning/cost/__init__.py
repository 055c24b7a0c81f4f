"""Counts the work of a compiled program on one device from its text. This needs no device.

`hlo` parses XLA's text of an optimized program. `count` adds up the work of its instructions:
floating-point operations (`operations`), traffic with the device's memory (`traffic`) and with
other devices (`links`).
"""

from grpo_jax.around.planning.cost.count import Cost, Counted, count, instruction_runs

__all__ = ["Cost", "Counted", "count", "instruction_runs"]
