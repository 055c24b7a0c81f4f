"""Describes devices that need not exist, so that programs can be compiled for them."""

from collections.abc import Sequence
import dataclasses
import os
import re
from typing import Any

import jax
from jax.experimental import topologies

from grpo_jax.parallel.chips import CHIPS
from grpo_jax.settings import ConfigError


@dataclasses.dataclass(frozen=True)
class _Gpu:
  """The properties of a GPU that XLA needs to compile for it and that `CHIPS` lacks.

  Attributes:
    kind: `jax.Device.device_kind`.
    capability: The major version of CUDA's compute capability, such as 9.
    cores: The number of streaming multiprocessors.
    shared: Bytes of shared memory of each multiprocessor.
    cache: Bytes of the L2 cache.
    clock: The clock rate in GHz.
  """

  kind: str
  capability: int
  cores: int
  shared: int
  cache: int
  clock: float


# The data sheets of A100 (2021), H100 (2023) and H200 (2024), SXM modules, and the tuning guides of
# CUDA 13 for Ampere and Hopper. The driver reports these names.
_GPUS = {
  "a100": _Gpu("NVIDIA A100-SXM4-80GB", 8, 108, 167936, 40 << 20, 1.41),
  "h100": _Gpu("NVIDIA H100 80GB HBM3", 9, 132, 233472, 50 << 20, 1.98),
  "h200": _Gpu("NVIDIA H200", 9, 132, 233472, 60 << 20, 1.98),
}
_RESERVED = 1024  # bytes of each core's shared memory that CUDA reserves
EXAMPLES = "v5e:2x2, v5p:2x2x4, h100:8 or cpu:4"


def devices_of(topology: str, chips: int | None) -> list[Any]:
  """The devices of a topology. TPUs and GPUs need not exist. CPU devices are real ones.

  Args:
    topology: A name such as v5e:2x2 or h100:8, or cpu:N for N devices on this machine.
    chips: How many chips to use, counted from the first. None means all.

  Raises:
    ConfigError: The topology does not exist, has fewer chips, or needs a compiler that is not
      installed.
  """
  kind, _, number = topology.partition(":")
  if kind == "cpu" or kind in _GPUS:
    if not re.fullmatch(r"[1-9]\d{0,3}|", number) or topology.endswith(":"):
      what = "devices of this machine" if kind == "cpu" else "of these GPUs in one machine"
      raise ConfigError(f"flag --topology={topology}: write {kind}:N for N {what}")
  if kind == "cpu":
    jax.config.update("jax_num_cpu_devices", int(number or 1))
    devices: Sequence[Any] = jax.devices("cpu")
  elif kind in _GPUS:
    devices = _gpu_devices(topology, _GPUS[kind], int(number or 1))
  else:
    devices = _tpu_devices(topology)
  # A chip may be several devices. --chips counts chips.
  chips_in_order = list(dict.fromkeys(_chip(device) for device in devices))
  if chips is not None and not 1 <= chips <= len(chips_in_order):
    raise ConfigError(f"flag --chips={chips}: {topology} has {len(chips_in_order)} chips")
  return [device for device in devices if _chip(device) in chips_in_order[:chips]]


def _gpu_devices(topology: str, gpu: _Gpu, number: int) -> Sequence[Any]:
  """Describes GPUs that need not exist. XLA then chooses matrix kernels without timing them."""
  jax.devices("cpu")  # initializes JAX, which registers the installed compilers
  options = {"topology": f"1x1x{number}", "target_config": _target(gpu)}
  try:
    return topologies.get_topology_desc(topology, "cuda", **options).devices
  except NotImplementedError:
    raise ConfigError(
      f"flag --topology={topology} needs XLA's compiler for GPUs: pip install 'jax[cuda]'"
    ) from None
  except Exception as error:  # the type of the error depends on the version of XLA
    reason = " ".join(str(error).split())
    raise ConfigError(f"flag --topology={topology}: {reason:.200}") from None


def _target(gpu: _Gpu) -> str:
  """XLA's description of a GPU: a GpuTargetConfigProto in text format."""
  device = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "threads_per_core_limit": 2048,
    "shared_memory_per_block": 49152,
    "shared_memory_per_core": gpu.shared,
    "shared_memory_per_block_optin": gpu.shared - _RESERVED,
    "core_count": gpu.cores,
    "fpus_per_core": 128 if gpu.capability == 9 else 64,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
    "block_dim_limit_x": 2147483647,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "device_address_bits": 64,
    "l2_cache_size": gpu.cache,
    "clock_rate_ghz": gpu.clock,
    "memory_bandwidth": int(CHIPS[gpu.kind].memory_bandwidth),
    "device_memory_size": int(CHIPS[gpu.kind].memory),
    "device_vendor": '"NVIDIA Corporation"',
    "name": f'"{gpu.kind}"',
    "driver_version": '"13.0.0"',
    "runtime_version": '"13.0.0"',
    "compile_time_toolkit_version": '"13.0.0"',
    "dnn_version": '"9.10.0"',
  }
  fields = "\n".join(f"  {name}: {value}" for name, value in device.items())
  # As XLA describes real GPUs from Hopper on (sm_90a). Without it, Hopper's special matrix
  # instructions are not compiled.
  extension = " feature_extension: ACCELERATED_FEATURES" if gpu.capability == 9 else ""
  capability = f"cuda_compute_capability {{ major: {gpu.capability}{extension} }}"
  return (
    f"gpu_device_info {{\n{fields}\n  {capability}\n}}\n"
    'platform_name: "CUDA"\ndnn_version_info { major: 9 minor: 10 }\n'
    f'device_description_str: "{gpu.kind}"\n'
  )


def _tpu_devices(topology: str) -> Sequence[Any]:
  """Describes TPUs that need not exist. Raises ConfigError."""
  # libtpu reads these when it is loaded. They keep it from looking or waiting for a TPU.
  settings = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # Any known name avoids a warning. The topology below decides.
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
  }
  os.environ.update(settings)
  # By default, libtpu describes a v4 chip as two devices. Real v4 chips appear as one device.
  options = {"chip_config_name": "megacore"} if topology.startswith("v4:") else {}
  try:
    described = topologies.get_topology_desc(platform="tpu", topology_name=topology, **options)
  except Exception as error:  # the type of the error depends on the version of libtpu
    if "not installed" in str(error):
      raise ConfigError(
        f"flag --topology={topology} needs the compiler for TPUs: pip install 'jax[tpu]'"
      ) from None
    reason = " ".join(str(error).split())
    raise ConfigError(
      f"flag --topology={topology}: {reason:.200}; name one such as {EXAMPLES}"
    ) from None
  return described.devices


def _chip(device: Any) -> Any:
  """A unique key of a device's chip: its coordinates if the device has them, else its id."""
  return tuple(getattr(device, "coords", (device.id,)))
