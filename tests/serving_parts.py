"""What the tests of the endpoint share: a server in a thread of its own, around any engine."""

import asyncio
import contextlib
import threading

import jax
import tokenizers

from grpo_jax import model
from grpo_jax.data.tokenizers import tokenizer
from grpo_jax.sampler.filters import FILTERS
from grpo_jax.sampler.logits import Decoding
from grpo_jax.serving.decoder import Counts
from grpo_jax.serving.device_flight import Sizes
from grpo_jax.serving.engine import AnswerPart, Engine, Row
from grpo_jax.serving.server import Server, ServerSettings
from tests import small_qwen

PROMPT_TOKENS, TOKENS, ROWS = 64, 40, 6
KEY = "a key"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def write_policy(folder):
  """A random model that writes texts, with a tokenizer and a chat template that shows tools."""
  texts = [problem["question"] + problem["answer"] for problem in small_qwen.problems(40)]
  small_qwen.make_checkpoint(folder, texts, every_id_is_text=True)
  file = folder / "tokenizer_config.json"
  shows_tools = "{# <tool_call> #}{% if tools %}{{ tools[0].function.name }}{% endif %}"
  file.write_text(
    file.read_text().replace('"chat_template": "', f'"chat_template": "{shows_tools}')
  )
  assert tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
  return folder


def open_policy(folder):
  """(config, params, tokenizer)"""
  config, params = model.load(folder)
  params = jax.tree.map(lambda x: x * 3, params)  # so that tokens have different probabilities
  return config, params, tokenizer.load(folder).for_model(config.vocab_size, "the model")


def make_engine(config, params, rows=ROWS, waiting=300, tokens=TOKENS, version=3):
  sizes = Sizes(rows=rows, prompt_tokens=PROMPT_TOKENS, waiting=waiting, texts=8)
  engine = Engine(config, Decoding(tokens, config.stop_ids), sizes, params, version)
  engine.start()
  return engine


@contextlib.contextmanager
def serving(engine, tokens, vocabulary, settings=None, reload=None, images=None):
  """Yields (the server, its address). The server stops when the block is left."""
  started, found = threading.Event(), {}

  def run():
    async def main():
      found["loop"], found["stop"] = asyncio.get_running_loop(), asyncio.Event()
      await server.run("127.0.0.1", 0, found["stop"], ready)

    asyncio.run(main())

  def ready(host, port):
    found["address"] = f"http://{host}:{port}"
    started.set()

  settings = settings or ServerSettings("m", grace=0.5)
  server = Server(engine, tokens, vocabulary, settings, reload, images=images)
  thread = threading.Thread(target=run)
  thread.start()
  assert started.wait(10)
  try:
    yield server, found["address"]
  finally:
    found["loop"].call_soon_threadsafe(found["stop"].set)
    thread.join(20)
  assert not thread.is_alive()


class Scripted:
  """An engine that writes the parts that a test says: `script(job)` yields their tokens."""

  def __init__(self, script):
    self.sizes, self.max_tokens = Sizes(8, PROMPT_TOKENS, 64), 10**6
    self.filters = FILTERS
    self.counts, self.version, self.waiting, self.in_flight = Counts(), 3, 0, 0
    self.is_open, self.failure = True, None
    self.cancelled, self._script = [], script

  def submit(self, jobs):
    rows = [Row(job) for job in jobs]
    for row in rows:
      threading.Thread(target=self._write, args=(row,), daemon=True).start()
    return rows

  def _write(self, row):
    for tokens in self._script(row.job):
      if row.is_cancelled:
        return
      row.job.hear(AnswerPart(tokens, [-0.5] * len(tokens), self.version, ""))
    row.job.hear(AnswerPart([], [], self.version, "stop"))

  def cancel(self, rows):
    for row in rows:
      row.is_cancelled = True
    self.cancelled += rows

  def close(self):
    self.is_open = False
