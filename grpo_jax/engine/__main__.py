"""Starts a server of the engine for a run, or prints the command that starts it.

python -m grpo_jax.engine --config=CONFIG --config.rollout.engine=vllm [--url=URL] [--print]

Pass the config of the run, with the same overrides. docs/engines.md has more.
"""

from pathlib import Path

from absl import flags

from grpo_jax import cli
from grpo_jax.engine import keep
from grpo_jax.engine.engines import ENGINES, line
from grpo_jax.run.checks import check_config
from grpo_jax.settings import ConfigError


def main(argv: list[str]) -> None:
  """Serves one URL with the engine until SIGTERM, or prints the command for each URL."""
  del argv
  values, config = flags.FLAGS, cli.config_from_flags()
  check_config(config)
  rollout = config.rollout
  if not rollout.engine:
    raise ConfigError("config key rollout.engine is '': set 'vllm' or 'sglang'")
  urls = [values.url] if values.url else list(rollout.engine_urls)
  if any(url not in rollout.engine_urls for url in urls):
    raise ConfigError(
      f"flag --url={values.url}: it must be one of rollout.engine_urls = {rollout.engine_urls}"
    )
  engine = ENGINES[rollout.engine]
  environment = engine.environment(config, values.cpu)

  def server_command(url: str, folder: str = "") -> list[str]:
    return engine.command(config, url, folder, on_cpu=values.cpu, program=values.program)

  if values.print:
    for url in urls:
      print(line(environment, server_command(url)))
    return
  if len(urls) > 1:  # this process keeps one server running
    raise ConfigError(f"flag --url is missing: name one of rollout.engine_urls = {urls}")
  key = engine.read_key()
  if key:  # as the run sends it, without the blanks around it
    environment = {**environment, engine.key: key}
  folder = Path(rollout.engine_folder).expanduser() if rollout.engine_restart else None
  keep.keep(lambda weights: server_command(urls[0], weights), environment, folder)


if __name__ == "__main__":
  cli.define_config_flag()
  flags.DEFINE_string("url", None, "which of rollout.engine_urls to serve")
  flags.DEFINE_bool("print", False, "print the command of each server, and start nothing")
  flags.DEFINE_bool("cpu", False, "the server computes on CPUs")
  flags.DEFINE_string("program", "", "vLLM's program, or the Python that has SGLang")
  cli.run(main)
