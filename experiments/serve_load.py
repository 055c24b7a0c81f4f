"""What large bodies and half requests cost the other clients of the endpoint.

python experiments/serve_load.py [--bodies=8] [--half=300] [--files=0] [--prompt_tokens=2048]

It makes a small run with a tokenizer of 4,096 tokens and serves it as a user does, in a process.
Then, one after the other:

* large: eight clients send bodies of 4 MB, several times, which are refused: prompts of one
  character, of words, of spaces and of many texts, and conversations. Others ask for 4 tokens.
* half: 300 clients send half a header and then nothing. Others ask for /health.
* broken: 300 clients send no HTTP, a broken gzip, a huge length, or leave a stream.

A line of JSON for each says the slowest sane request, the memory of the server and how many bytes
its log has got. --files=256 lets the server open so few files. The exit code is 1 if a sane request
took more than a second, the log grew by more than 10 kB, or memory by more than 300 MB.
"""

import argparse
from collections.abc import Callable, Iterator
import concurrent.futures
import contextlib
import gzip
import http.client
import itertools
import json
import os
from pathlib import Path
import re
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parents[1]
BODY = 4 * 2**20 - 200  # bytes: just below the limit
LONGEST = 128  # characters of the longest token, as in large vocabularies
TEMPLATE = (
  "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
  "<|im_start|>assistant\n"
)
CONFIG = """from grpo_jax.configs import default
def get_config(preset="grpo"):
  c = default.get_config(preset)
  c.steps = 1
  c.model.update(embed_dim=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32, mlp_dim=128)
  c.batch.update(prompts=2, group_size=2)
  c.data.task, c.data.path, c.data.tokenizer = "gsm8k", "rows", "tokenizer"
  c.data.max_prompt_tokens = {tokens}
  c.sampling.max_tokens = 16
  c.eval.every = 0
  return c
"""


class Server:
  """A process that serves a small run, and its log."""

  def __init__(self, folder: Path, prompt_tokens: int, files: int):
    """Trains one step, and serves."""
    _make_inputs(folder, prompt_tokens)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    python = [sys.executable, "-m"]
    train = [*python, "grpo_jax.train", "--config=load.py", "--workdir=run"]
    subprocess.run(train, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    command = [*python, "grpo_jax.serve", "--workdir=run", "--port=0", "--rows=4", "--model_name=m"]
    command += [f"--max_prompt_tokens={prompt_tokens}", "--max_tokens=64"]

    def limit() -> None:
      if files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    self.log = folder / "log"
    with self.log.open("w") as log:
      self.process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=log, stderr=log, preexec_fn=limit
      )
    while not (found := re.search(r"http://([\d.]+):(\d+)/v1", self.log.read_text())):
      if self.process.poll() is not None:
        sys.exit(self.log.read_text())
      time.sleep(0.1)
    self.address = found[1], int(found[2])

  def memory(self) -> int:
    """Megabytes that it holds."""
    status = Path(f"/proc/{self.process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) // 1024

  def connect(self) -> socket.socket:
    """A connection to it."""
    return socket.create_connection(self.address, timeout=60)

  def ask(self, method: str, path: str, body: bytes | None = None) -> int:
    """The status of an answer."""
    connection = http.client.HTTPConnection(*self.address, timeout=120)
    with contextlib.closing(connection):
      connection.request(method, path, body, {"Content-Type": "application/json"})
      answer = connection.getresponse()
      answer.read()
      return answer.status


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--bodies", type=int, default=8, help="clients that send large bodies")
  parser.add_argument("--half", type=int, default=300, help="clients that send half a header")
  parser.add_argument("--files", type=int, default=0, help="that the server may open; 0: as here")
  parser.add_argument("--prompt_tokens", type=int, default=2048)
  flags = parser.parse_args()
  with tempfile.TemporaryDirectory(prefix="serve_load_") as folder:
    server = Server(Path(folder), flags.prompt_tokens, flags.files)
    sane = json.dumps({"prompt": "Ann has", "max_tokens": 4, "seed": 1}).encode()

    def complete() -> int:
      return server.ask("POST", "/v1/completions", sane)

    def health() -> int:
      return server.ask("GET", "/health")

    try:
      results = [
        measured(server, "alone", complete, lambda: time.sleep(3)),
        measured(server, "large", complete, lambda: send_large(server, flags.bodies)),
        measured(server, "half", health, lambda: send_half(server, flags.half)),
        measured(server, "broken", complete, lambda: send_broken(server)),
      ]
    finally:
      server.process.terminate()
      server.process.wait()
    print(server.log.read_text()[-2000:], file=sys.stderr)
  sys.exit(0 if all(results) else 1)


def measured(
  server: Server, name: str, sane: Callable[[], int], load: Callable[[], dict[str, int]]
) -> bool:
  """Asks again and again while others load the server. Returns whether it bears them."""
  sane()
  seconds, done = list[float](), threading.Event()
  memory, log = [server.memory()], server.log.stat().st_size

  def ask() -> None:
    while not done.is_set():
      start = time.monotonic()
      assert sane() == 200
      seconds.append(time.monotonic() - start)
      memory.append(server.memory())
      time.sleep(0.02)

  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    asking = pool.submit(ask)
    try:
      said = load() or {}
    finally:
      done.set()
    asking.result()
  grown = server.log.stat().st_size - log
  print(
    json.dumps(
      {
        "load": name,
        "sane requests": len(seconds),
        "median s": round(sorted(seconds)[len(seconds) // 2], 3),
        "slowest s": round(max(seconds), 3),
        "MB before": memory[0],
        "most MB": max(memory),
        "MB after": server.memory(),
        "log grew by bytes": grown,
      }
      | said
    ),
    flush=True,
  )
  return max(seconds) <= 1 and grown < 10_000 and max(memory) - memory[0] < 300


def send_large(server: Server, clients: int) -> dict[str, int]:
  """Each client sends each kind of body in turn. Returns how often which status came."""
  count = itertools.count()

  def send_all(client: int) -> Iterator[int]:
    kinds = list(_large())
    for path, body in kinds[client % len(kinds) :] + kinds[: client % len(kinds)]:
      next(count)
      yield server.ask("POST", path, body)

  with concurrent.futures.ThreadPoolExecutor(clients) as pool:
    found = pool.map(lambda client: list(send_all(client)), range(clients))
    statuses = [status for some in found for status in some]
  return {f"status {status}": statuses.count(status) for status in sorted({*statuses})}


def send_half(server: Server, clients: int) -> dict[str, int]:
  """Half headers. Returns how many connections the server has closed after 40 seconds."""
  half = [server.connect() for _ in range(clients)]
  for one in half:
    one.sendall(b"GET /health HTTP/1.1\r\nHost")
  time.sleep(40)
  closed = 0
  for one in half:
    one.settimeout(0)
    with contextlib.suppress(BlockingIOError):
      try:
        closed += one.recv(1) == b""
      except ConnectionError:
        closed += 1
    one.close()
  return {"closed": closed, "of": clients}


def send_broken(server: Server, clients: int = 75) -> dict[str, int]:
  """Four kinds of clients, one after the other."""
  good = json.dumps({"prompt": "Ann", "max_tokens": 64, "min_tokens": 64, "stream": True}).encode()
  head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
  length = b"Content-Length: %d\r\n"
  broken = gzip.compress(good)[4:]
  kinds = [
    b"\x16\x03\x01\x02\x00\x01",
    head + length % len(broken) + b"Content-Encoding: gzip\r\n\r\n" + broken,
    head + length % 99999999999999 + b"\r\n",
    head + length % len(good) + b"\r\n" + good,
  ]
  for data in kinds * clients:
    with server.connect() as one:
      one.sendall(data)
      one.recv(10)
  return {"clients": len(kinds) * clients}


def _large() -> Iterator[tuple[str, bytes]]:
  """(path, body) of the refused requests."""
  words = " ".join(str(i * i % 9973) for i in range(BODY // 5))
  texts = ["a" * BODY, words, " " * BODY, "a," * (BODY // 2)]
  for text in texts:
    yield "/v1/completions", json.dumps({"prompt": text[: BODY - 100]}).encode()
    message = {"role": "user", "content": text[: BODY - 100]}
    yield "/v1/chat/completions", json.dumps({"messages": [message]}).encode()
  yield "/v1/completions", json.dumps({"prompt": ["a"] * (BODY // 5 - 100)}).encode()
  yield "/v1/completions", json.dumps({"prompt": [1] * (BODY // 3 - 100)}).encode()
  empty = {"role": "user", "content": ""}
  yield "/v1/chat/completions", json.dumps({"messages": [empty] * (BODY // 33)}).encode()


def _make_inputs(folder: Path, prompt_tokens: int) -> None:
  """The config, the rows and the tokenizer of the run."""
  (folder / "load.py").write_text(CONFIG.format(tokens=prompt_tokens))
  (folder / "rows").mkdir()
  row = json.dumps({"question": "Ann has 1+2=", "answer": "3#### 3"}) + "\n"
  for split in ("train", "test"):
    (folder / "rows" / f"{split}.jsonl").write_text(row * 4)
  engine = tokenizers.Tokenizer(models.BPE())
  engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  engine.decoder = decoders.ByteLevel()
  special = ["<|im_start|>", "<|im_end|>"]
  trainer = trainers.BpeTrainer(
    vocab_size=4096, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
  )
  texts = [page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))]
  engine.train_from_iterator(texts, trainer)
  engine.add_tokens(["=" * LONGEST])
  (folder / "tokenizer").mkdir()
  engine.save(str(folder / "tokenizer" / "tokenizer.json"))
  config = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "chat_template": TEMPLATE}
  (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
  main()
