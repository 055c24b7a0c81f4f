"""A server that answers as vLLM's does, with the model of this project in the place of its own."""

import contextlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import model
from grpo_jax.data.tokenizers import tokenizer

LENGTH = 32  # all rows are padded to it, so that one program is compiled


class Refusal(Exception):
  def __init__(self, status, message):
    super().__init__(message)
    self.status = status


class FakeVllm:
  """A server at a free port of this machine.

  Attributes:
    calls: The paths that were called.
    settings: What it says of itself.
    loads: What becomes of new weights: "all", "none", or "nothing" where it answers never.
    before: Called before a completion. It may raise or wait.
  """

  def __init__(self, folder):
    self.folder = self.loaded = str(folder)
    self.calls, self.loads, self.adapters = [], "all", {}
    self.before = lambda body: None
    self.settings = {"dtype": "torch.float32", "logprobs_mode": "processed_logprobs"}
    self.longest, self.port, self._server = LENGTH, 0, None
    self._params, self._lock = {}, threading.Lock()
    self.tokens = tokenizer.load(str(folder))
    self.start()

  @property
  def url(self):
    return f"http://127.0.0.1:{self.port}"

  def start(self):
    """Serves, at the same port as before."""
    self._server = ThreadingHTTPServer(("127.0.0.1", self.port), handler_of(self))
    self._server.daemon_threads = True
    self._server.open = set()
    self.port = self._server.server_address[1]
    threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

  def stop(self):
    """Ends as a killed process does: whoever waits for an answer gets none."""
    server, self._server = self._server, None
    if server is not None:
      server.shutdown()
      server.server_close()
      for connection in [*server.open]:
        with contextlib.suppress(OSError):
          connection.shutdown(2)

  def answer(self, path, body):
    self.calls.append(path)
    route = path.partition("?")[0]
    if route == "/v1/models":
      return {"data": [{"id": "policy", "root": self.folder, "max_model_len": self.longest}]}
    if route == "/server_info":
      return {"vllm_config": {"model_config": self.settings}}
    if route == "/detokenize":
      return {"prompt": self.tokens.decode(body["tokens"])}
    if route == "/collective_rpc" and body["method"] == "reload_weights":
      self.load(body["kwargs"]["weights_path"])
    if route == "/v1/load_lora_adapter":
      self.adapters[body["lora_name"]] = body["lora_path"]
    if route == "/v1/unload_lora_adapter":
      del self.adapters[body["lora_name"]]
    if route == "/v1/completions":
      return self.completions(body)
    return {}

  def load(self, folder):
    if self.loads == "nothing":
      threading.Event().wait(5)
    if self.loads == "all":
      self.loaded = folder

  def params(self, name):
    """(shape, parameters) of the model that a request names."""
    source = self.loaded, self.adapters.get(name, "")
    if source not in self._params:
      shape = model.load_config(source[0])
      params = model.load(source[0])[1]
      if source[1]:
        shape = shape.__class__(**vars(shape) | {"lora": model.load_adapter_shape(source[1])})
        params = model.join(params, model.load_adapters(source[1], shape))
      self._params = {source: (shape, params)}
    return self._params[source]

  def logits(self, ids, name):
    """Those of the tokens that follow each of `ids`, float32 [N, V]."""
    with self._lock:
      shape, params = self.params(name)
      return np.asarray(forward(params, shape, padded(ids)))[: len(ids)]

  def completions(self, body):
    if isinstance(body["prompt"][0], list):
      rows = enumerate(body["prompt"])
      return {"choices": [self.scored(n, row, body["model"]) for n, row in rows]}
    self.before(body)
    rng, drawn = np.random.default_rng(body["seed"]), []
    stop_ids, reason = body["stop_token_ids"], "length"
    while len(drawn) < body["max_tokens"]:
      ids = body["prompt"] + [token for token, _ in drawn]
      logits_V = self.logits(ids, body["model"])[-1]
      logprobs_V = np.asarray(jax.nn.log_softmax(logits_V / (body["temperature"] or 1.0)))
      weights = np.exp(logprobs_V.astype(np.float64))
      token = rng.choice(len(weights), p=weights / weights.sum())
      token = int(token if body["temperature"] else logits_V.argmax())
      drawn.append((token, float(logprobs_V[token])))
      text = self.tokens.decode([token for token, _ in drawn])
      if token in stop_ids or any(stop in text for stop in body["stop"]):
        reason = "stop"
        break
    choice = {
      "index": 0,
      "token_ids": [token for token, _ in drawn],
      "logprobs": {"token_logprobs": [logprob for _, logprob in drawn]},
      "finish_reason": reason,
    }
    return {"choices": [choice]}

  def scored(self, number, row, name):
    logprobs = np.asarray(jax.nn.log_softmax(self.logits(row, name)))
    scores = [
      {str(token): {"logprob": float(logprobs[place, token])}}
      for place, token in enumerate(row[1:])
    ]
    return {"index": number, "prompt_logprobs": [None, *scores]}


@contextlib.contextmanager
def serving(*folders):
  """A server for each of the folders."""
  servers = [FakeVllm(folder) for folder in folders]
  try:
    yield servers
  finally:
    for server in servers:
      server.stop()


def padded(ids):
  return jnp.asarray([[*ids, *[0] * (LENGTH - len(ids))]])


def _forward(params, shape, ids_BN):
  positions_BN = jnp.arange(LENGTH)[None]
  return model.forward(params, shape, ids_BN, positions_BN)[0][0]


forward = jax.jit(_forward, static_argnums=1)


def handler_of(fake):
  class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def setup(self):
      super().setup()
      self.server.open.add(self.connection)

    def finish(self):
      self.server.open.discard(self.connection)
      with contextlib.suppress(OSError):
        super().finish()

    def do_GET(self):
      self.respond(None)

    def do_POST(self):
      self.respond(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def respond(self, body):
      status, answer = 200, None
      try:
        answer = fake.answer(self.path, body)
      except Refusal as error:
        status, answer = error.status, {"error": {"message": str(error)}}
      content = json.dumps(answer).encode()
      with contextlib.suppress(OSError):
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments):
      pass

  return Handler
