"""The peaks of accelerators by their data sheets: one table."""

import dataclasses
import os

import jax

_GIB = 2.0**30


@dataclasses.dataclass(frozen=True)
class Chip:
  """One chip. Numbers are per second, and peaks that no program reaches.

  Attributes:
    memory: Bytes of main memory that programs can use.
    flops: Floating-point operations with bfloat16 inputs, dense.
    memory_bandwidth: Bytes to and from the main memory.
    link_bandwidth: Bytes that the chip can send, over all its links to other chips of the same
      slice or machine together. It can receive as many at the same time.
  """

  memory: float
  flops: float
  memory_bandwidth: float
  link_bandwidth: float


# By `jax.Device.device_kind`. TPU: docs.cloud.google.com/tpu/docs/v4, v5e, v5p and v6e, read in
# 2026. `memory` is smaller than there: it is what the compiler of libtpu 0.0.42 gives to a program
# ("exceeds available HBM"). The pages give the links of a chip in both directions together (400
# GB/s for v5e, 800 for v6e) or in one (4800 Gbit/s for v5p). Those of v4 are from Jouppi et al.
# 2304.01433, table 4: 6 links of 50 GB/s.
# NVIDIA: the data sheets of A100 (2021), H100 (2023) and H200 (2024), SXM modules. The sheets give
# NVLink in both directions together (600 and 900 GB/s), and for H100 operations of sparse matrices,
# twice those of dense ones. `memory` is what CUDA said of an H100 (LOG.md, 2026-11-26), and for the
# others as much of what they have.
CHIPS = {
  "TPU v4": Chip(30.5 * _GIB, 275e12, 1200e9, 300e9),
  "TPU v5 lite": Chip(15.75 * _GIB, 197e12, 819e9, 200e9),
  "TPU v5": Chip(95.74 * _GIB, 459e12, 2765e9, 600e9),
  "TPU v6 lite": Chip(31.25 * _GIB, 918e12, 1638e9, 400e9),
  "NVIDIA A100-SXM4-40GB": Chip(42.5e9, 312e12, 1555e9, 300e9),
  "NVIDIA A100-SXM4-80GB": Chip(85e9, 312e12, 2039e9, 300e9),
  "NVIDIA H100 80GB HBM3": Chip(85e9, 989e12, 3350e9, 450e9),
  "NVIDIA H200": Chip(149.9e9, 989e12, 4800e9, 450e9),
}


def chip_of(device: jax.Device) -> Chip | None:
  """The chip of a device, or None if the table has none of its kind."""
  return CHIPS.get(device.device_kind)


def reported_memory(device: jax.Device) -> float | None:
  """The bytes that a device says programs can use, or None if it does not say.

  One that a program is only compiled for says nothing.
  """
  try:
    stats = device.memory_stats()
  except jax.errors.JaxRuntimeError:
    return None
  return (stats or {}).get("bytes_limit")


def memory_of(device: jax.Device) -> float | None:
  """The bytes that programs can use on a device.

  Its own answer counts most, then the table. The devices of a CPU share the memory of the machine.
  None if nothing is known.
  """
  reported = reported_memory(device)
  if reported is not None:
    return reported
  chip = chip_of(device)
  if chip is not None:
    return chip.memory * (_gpu_share() if device.platform == "gpu" else 1.0)
  return machine_memory() / device.client.device_count() if device.platform == "cpu" else None


def _gpu_share() -> float:
  """The share of a GPU's memory that JAX gives to programs. Three quarters, if nobody says more."""
  return float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", 0.75))


def machine_memory() -> float:
  """The bytes of this machine's memory."""
  return 1.0 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
