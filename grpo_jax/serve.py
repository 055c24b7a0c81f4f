"""Serves a policy through an OpenAI-compatible endpoint.

python -m grpo_jax.serve --workdir=DIR [--port=8000] [--host=127.0.0.1] [--api_key_file=FILE]
python -m grpo_jax.serve --config=configs/gsm8k.py --config.model.path=FOLDER
"""

import asyncio
from collections.abc import Callable
import dataclasses
import functools
import gc
import os
from pathlib import Path
import signal
import sys
from typing import TYPE_CHECKING

from absl import flags

from grpo_jax import cli
from grpo_jax.console import exit_codes
from grpo_jax.progress import doing
from grpo_jax.settings import ConfigError, is_loopback, is_text, path_of

if TYPE_CHECKING:  # --help and mistakes in flags need no jax, so it is imported where it is used
  from grpo_jax.config import Config
  from grpo_jax.evaluation.policy import Policy
  from grpo_jax.run.run import Run
  from grpo_jax.serving.engine import Engine
  from grpo_jax.serving.images import ImageReader

_KEY = "GRPO_JAX_API_KEY"  # the environment variable with the key
_MOST_TEXTS = 16  # texts in the prefix cache for each row, at most
_BYTES_WITH_IMAGES = 32 * 2**20  # the limit of a request body if the model sees images
_COUNTS = ("rows", "waiting", "max_prompt_tokens", "max_tokens", "request_seconds")  # >= 1


def main(argv: list[str]) -> None:
  """Serves the policy of the flags until SIGTERM, Ctrl-C or a failure of the engine."""
  del argv
  values = flags.FLAGS
  _check_flags()
  try:
    from grpo_jax.serving.server import Server, ServerSettings  # here, because aiohttp is optional
  except ImportError as error:
    if error.name != "aiohttp":
      raise
    package = "the package aiohttp: pip install -e '.[serve]'"
    raise ConfigError(f"grpo_jax.serve needs {package}") from None
  key = _key()
  policy = cli.open_policy(_with_whole_caches)
  run, name = policy.run, values.model_name or _name_of(policy)
  engine, image_reader = make_engine(policy), reader_of(run)
  del policy  # the engine has its own copy of the weights
  print(f"{name}: compiling", flush=True)
  with doing("compiling"):
    engine.start()
  # A garbage collection stops all threads, so it should skip the objects that exist now. A thread
  # that parses a large body should let other threads run after a millisecond.
  gc.freeze()
  sys.setswitchinterval(0.001)
  reload = None  # only the newest checkpoint of a run may be replaced by a newer one
  if values.workdir is not None and values.step is None:
    reload = functools.partial(load_newest, run, cli.folder_of_run(values.workdir), engine)
  settings = ServerSettings(model=name, key=key, seconds=float(values.request_seconds))
  if image_reader is not None:
    settings = dataclasses.replace(settings, body_bytes=_BYTES_WITH_IMAGES)
  vocabulary = run.parameters.model.vocab_size
  server = Server(engine, run.tokenizer, vocabulary, settings, reload, images=image_reader)
  remark = ""
  if not key and not is_loopback(values.host):
    remark = "; whoever reaches this address can use it: set --api_key_file"
  stopped_by = asyncio.run(_until_signal(server.run, name, remark))
  if engine.failure is not None:
    raise engine.failure
  if stopped_by == signal.SIGINT:
    raise KeyboardInterrupt  # exit code 130, as from any command. SIGTERM ends with 0


def _with_whole_caches(config: "Config") -> "Config":
  """Sets sampling.context to 1: the endpoint's cache grows, so its slots are not split."""
  if config.sampling.context > 1:
    given = config.sampling.context
    print(f"sampling.context={given} is not used: each device has all slots of its rows")
  return config.replace({"sampling.context": 1})


def make_engine(policy: "Policy") -> "Engine":
  """Builds the engine that decodes completions, with the limits of the flags. Does not start it.

  Raises:
    ConfigError: The longest prompt with the longest completion do not fit the model.
  """
  from grpo_jax.model import cache_bytes
  from grpo_jax.sampler.sampling import decoding_of
  from grpo_jax.serving.device_flight import Sizes
  from grpo_jax.serving.engine import Engine

  values, run = flags.FLAGS, policy.run
  config, shape = run.config, run.parameters.sampling.model
  prompt_tokens = values.max_prompt_tokens or config.data.max_prompt_tokens
  decoding = decoding_of(config.sampling, shape.stop_ids)
  decoding = dataclasses.replace(decoding, max_tokens=values.max_tokens or decoding.max_tokens)
  if prompt_tokens + decoding.max_tokens > shape.max_positions:
    raise ConfigError(
      f"flags --max_prompt_tokens={prompt_tokens} and --max_tokens={decoding.max_tokens}: together"
      f" they must be at most the model's {shape.max_positions} positions"
    )
  # Rounded up, because each shard of the devices decodes the same number of rows.
  rows = -(-values.rows // shape.row_shards) * shape.row_shards
  # By default, the prefix cache has a text a row. A text has room for the longest prompt.
  texts, mebibytes = rows, values.prefix_cache_mib
  if mebibytes is not None:  # on each device, which holds 1 / row_shards of the texts
    text_bytes = cache_bytes(shape, prompt_tokens, decoding.max_tokens).place
    texts = min(_MOST_TEXTS * rows, int(mebibytes * 2**20 // text_bytes) * shape.row_shards)
  sizes = Sizes(rows, prompt_tokens, values.waiting, texts)
  params = run.parameters.for_sampling(policy.params)
  return Engine(shape, decoding, sizes, params, policy.step)


def reader_of(run: "Run") -> "ImageReader | None":
  """Returns a reader that processes images as in training. None if the model sees no images."""
  if run.processor is None:
    return None
  from grpo_jax.serving.images import ImageReader

  return ImageReader(run.processor)


def load_newest(run: "Run", workdir: Path, engine: "Engine") -> int:
  """Loads the newest checkpoint of the run in `workdir` into the engine, and returns the step."""
  from grpo_jax.storage.checkpoint import Checkpoints

  checkpoints = Checkpoints(workdir / "checkpoints", keep=1, layers_of=run.parameters.layers_of)
  step, trained = checkpoints.restore_params(run.parameters.abstract)
  engine.set_weights(run.parameters.for_sampling(trained), step)
  return step


async def _until_signal(serve: Callable, name: str, remark: str) -> int | None:
  """Serves until SIGTERM or Ctrl-C. A second signal ends the process at once.

  Args:
    serve: `Server.run`: (host, port, stop, ready) -> a coroutine that serves until `stop` is set,
      and that calls ready(host, port) once it listens.
    name: The name of the model, for the line that says where it is served.
    remark: The end of that line.

  Returns:
    The number of the first signal. None if the engine failed.
  """
  values, stop, received = flags.FLAGS, asyncio.Event(), list[int]()

  def on_signal(number: int) -> None:
    if received:
      line = f"{signal.Signals(number).name} again: left at once"
      exit_codes.leave_at_once(KeyboardInterrupt(), (128 + number, line))
    received.append(number)
    line = f"{signal.Signals(number).name}: stopping once what runs has ended"
    print(f"{line}; a second signal leaves at once", file=sys.stderr, flush=True)
    stop.set()

  def ready(host: str, port: int) -> None:
    address = f"[{host}]" if ":" in host else host
    print(f"serving {name} at http://{address}:{port}/v1{remark}", flush=True)

  for number in (signal.SIGTERM, signal.SIGINT):
    asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
  await serve(values.host, values.port, stop, ready)
  return received[0] if received else None


def _check_flags() -> None:
  """Raises ConfigError for the first flag that is out of range."""
  values = flags.FLAGS
  for name in _COUNTS:
    if values[name].value is not None and values[name].value < 1:
      raise ConfigError(f"flag --{name}={values[name].value}: it must be at least 1")
  if (values.prefix_cache_mib or 0) < 0:
    raise ConfigError(
      f"flag --prefix_cache_mib={values.prefix_cache_mib}: it must be at least 0, which is off"
    )
  if not 0 <= values.port <= 65535:
    raise ConfigError(f"flag --port={values.port}: it must be between 0 and 65535")
  if not values.host:
    raise ConfigError("flag --host is empty: give an address, such as 127.0.0.1")


def _key() -> str:
  """The API key from --api_key_file, or else from the environment variable. "" without a key.

  Raises ConfigError if the file cannot be read or is empty, or the key is not UTF-8.
  """
  file = flags.FLAGS.api_key_file
  if file is None:
    key = os.environ.get(_KEY, "").strip()
    if not is_text(key):
      raise ConfigError(f"environment variable {_KEY}: the key is not UTF-8")
    return key
  try:
    key = path_of(file, "flag --api_key_file").read_text("utf-8-sig").strip()  # -sig drops a BOM
  except (OSError, UnicodeDecodeError) as error:
    raise ConfigError(f"flag --api_key_file={file}: it cannot be read ({error})") from None
  if not key:
    raise ConfigError(f"flag --api_key_file={file}: the file is empty; write a key into it")
  return key


def _name_of(policy: "Policy") -> str:
  """The name of the model for clients: the last part of the folder's name."""
  source = flags.FLAGS.workdir or policy.run.config.model.path
  return source.rstrip("/").split("/")[-1] or "policy"


if __name__ == "__main__":
  flags.DEFINE_string("host", "127.0.0.1", "the address to listen at; 0.0.0.0 is all")
  flags.DEFINE_integer("port", 8000, "the port to listen at; 0 takes a free one")
  flags.DEFINE_string(
    "api_key_file", None, f"a file with the key that clients must send (default: ${_KEY}, or none)"
  )
  flags.DEFINE_string("model_name", None, "what clients call the model (default: its folder)")
  flags.DEFINE_integer("rows", 32, "how many completions are decoded together")
  flags.DEFINE_integer("waiting", 512, "how many completions may wait")
  flags.DEFINE_integer(
    "prefix_cache_mib",
    None,
    "memory of a device for texts that prompts begin with; 0: off (default: a text a row)",
  )
  flags.DEFINE_integer(
    "max_prompt_tokens", None, "the longest prompt (default: data.max_prompt_tokens)"
  )
  flags.DEFINE_integer("max_tokens", None, "longest completion (default: sampling.max_tokens)")
  flags.DEFINE_integer("request_seconds", 600, "the longest that an answer may take")
  cli.define_policy_flags()
  cli.run(main)
