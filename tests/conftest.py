"""Eight simulated devices, and compilations kept for the session, before anything imports jax."""
import os
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
    " --xla_force_host_platform_device_count=8"
    " --xla_backend_optimization_level=0")  # most of the suite's time is compilation
_cache = tempfile.TemporaryDirectory(prefix="grpo_jax_compiled_")  # removed when the session ends
os.environ.update(JAX_COMPILATION_CACHE_DIR=_cache.name, JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
                  JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1")
