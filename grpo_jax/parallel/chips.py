"""The peak performance of accelerators according to their data sheets, as a table."""

import dataclasses
import os

import jax

_GIB = 2.0**30


@dataclasses.dataclass(frozen=True)
class Chip:
  """The memory and the peak rates of a chip. No program reaches these rates.

  Attributes:
    memory: Bytes of main memory that programs can use.
    flops: Dense floating-point operations per second with bfloat16 inputs.
    memory_bandwidth: Bytes per second to and from the main memory.
    link_bandwidth: Bytes per second that the chip can send over all links to other chips of the
      same slice or machine together. It can receive as many at the same time.
  """

  memory: float
  flops: float
  memory_bandwidth: float
  link_bandwidth: float


# By `jax.Device.device_kind`. TPU: docs.cloud.google.com/tpu/docs/v4, v5e, v5p and v6e, read in
# 2026. `memory` is smaller than there: it is the limit of the compiler of libtpu 0.0.42 ("exceeds
# available HBM"). The pages state the bandwidth of a chip's links in both directions together (400
# GB/s for v5e, 800 for v6e) or in one (4800 Gbit/s for v5p). For v4 it is from Jouppi et al.
# 2304.01433, table 4: 6 links of 50 GB/s.
# NVIDIA: the data sheets of A100 (2021), H100 (2023) and H200 (2024), SXM modules. The sheets state
# NVLink in both directions together (600 and 900 GB/s), and for H100 the operations with sparse
# matrices, twice those with dense ones. `memory` is what CUDA reported for an H100 (LOG.md,
# 2026-11-26), and the same share of the nominal memory for the others.
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
  """The entry of CHIPS for a device, or None if there is none."""
  return CHIPS.get(device.device_kind)


def reported_memory(device: jax.Device) -> float | None:
  """The bytes that programs can use according to the device, or None if it reports nothing.

  A device for which programs are only compiled reports nothing.
  """
  try:
    stats = device.memory_stats()
  except jax.errors.JaxRuntimeError:
    return None
  return (stats or {}).get("bytes_limit")


def memory_of(device: jax.Device) -> float | None:
  """The bytes that programs can use on a device, or None if they are unknown.

  Uses the device's report if there is one, and otherwise CHIPS. The devices of a CPU share the
  memory of the machine.
  """
  reported = reported_memory(device)
  if reported is not None:
    return reported
  chip = chip_of(device)
  if chip is not None:
    return chip.memory * (_gpu_share() if device.platform == "gpu" else 1.0)
  return machine_memory() / device.client.device_count() if device.platform == "cpu" else None


def _gpu_share() -> float:
  """The share of a GPU's memory that JAX gives to programs: by default, three quarters."""
  return float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", 0.75))


def machine_memory() -> float:
  """The bytes of this machine's memory."""
  return 1.0 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
