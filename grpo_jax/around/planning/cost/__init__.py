"""Counts the work of a compiled program on one device from its text: no device is needed.

`hlo` reads XLA's text of an optimised program, `count` adds up what its instructions do:
floating-point operations (`operations`), traffic with the device's memory (`traffic`) and with
other devices (`links`).
"""

from grpo_jax.around.planning.cost.count import Cost, Counted, count, instruction_runs

__all__ = ["Cost", "Counted", "count", "instruction_runs"]
