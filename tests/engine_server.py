"""Servers that answer as vLLM and SGLang do, with the model of this project in place of theirs."""

import contextlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import model
from grpo_jax.data.tokenizers import tokenizer
from grpo_jax.sampler.logits import Decoding, RowSettings
from grpo_jax.serving.device_flight import Sizes
from grpo_jax.serving.engine import Engine, Job
from grpo_jax.serving.requests import row_number

LENGTH = 32  # all rows are padded to it, so that one program is compiled


class Refusal(Exception):
  def __init__(self, status, message):
    super().__init__(message)
    self.status = status


class _Http(ThreadingHTTPServer):
  daemon_threads = True
  request_queue_size = 512  # a run asks for all its rows at once


class FakeEngine:
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
    self.longest, self.port, self._server = LENGTH, 0, None
    self._params, self._lock = {}, threading.Lock()
    self.tokens = tokenizer.load(str(folder))
    self.start()

  @property
  def url(self):
    return f"http://127.0.0.1:{self.port}"

  def start(self):
    """Serves, at the same port as before."""
    self._server = _Http(("127.0.0.1", self.port), handler_of(self))
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

  def drawn(self, body, name, ids, most, temperature, rng, stops_at):
    """(Tokens, their log-probs, whether one has stopped them), as a request's `body` asks."""
    self.before(body)
    drawn = []
    while len(drawn) < most:
      logits_V = self.logits(ids + [token for token, _ in drawn], name)[-1]
      logprobs_V = np.asarray(jax.nn.log_softmax(logits_V / (temperature or 1.0)))
      weights = np.exp(logprobs_V.astype(np.float64))
      token = rng.choice(len(weights), p=weights / weights.sum())
      token = int(token if temperature else logits_V.argmax())
      drawn.append((token, float(logprobs_V[token])))
      if stops_at([token for token, _ in drawn]):
        return *map(list, zip(*drawn)), True
    return *map(list, zip(*drawn)), False

  def scored(self, row, name):
    """The log-probs of a row's tokens from the second on."""
    logprobs = np.asarray(jax.nn.log_softmax(self.logits(row, name)))
    return [float(logprobs[place, token]) for place, token in enumerate(row[1:])]


class FakeVllm(FakeEngine):
  """Answers as vLLM does."""

  engine = "vllm"

  def __init__(self, folder):
    self.settings = {"dtype": "torch.float32", "logprobs_mode": "processed_logprobs"}
    super().__init__(folder)

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

  def completions(self, body):
    name, ids = body["model"], body["prompt"]
    if isinstance(ids[0], list):
      rows = enumerate(ids)
      return {"choices": [self.choice_of_scores(n, row, self.scored(row, name)) for n, row in rows]}

    def stops_at(tokens):
      text = self.tokens.decode(tokens)
      return tokens[-1] in body["stop_token_ids"] or any(stop in text for stop in body["stop"])

    rng = np.random.default_rng(body["seed"])
    drawn = self.drawn(body, name, ids, body["max_tokens"], body["temperature"], rng, stops_at)
    tokens, logprobs, has_stopped = drawn
    choice = {
      "index": 0,
      "token_ids": tokens,
      "logprobs": {"token_logprobs": logprobs},
      "finish_reason": "stop" if has_stopped else "length",
    }
    return {"choices": [choice]}

  def choice_of_scores(self, number, row, scores):
    pairs = zip(row[1:], scores)
    scores = [{str(token): {"logprob": score}} for token, score in pairs]
    return {"index": number, "prompt_logprobs": [None, *scores]}


class SamplingVllm(FakeVllm):
  """Answers as vLLM does, and draws as fast as this project's own sampler, which it uses."""

  def __init__(self, folder, prompt_tokens, tokens, rows):
    super().__init__(folder)
    self.longest = prompt_tokens + tokens + 1
    shape, params = self.params("")
    sizes = Sizes(rows, prompt_tokens, 2 * rows)
    self._engine = Engine(shape, Decoding(tokens, shape.stop_ids), sizes, params)
    self._engine.start()

  def load(self, folder):
    super().load(folder)
    self._engine.set_weights(self.params("")[1], 0)

  def drawn(self, body, name, ids, most, temperature, rng, stops_at):
    parts, ended = [], threading.Event()

    def hear(part):
      parts.append(part)
      if part.finish:
        ended.set()

    settings = RowSettings(temperature, max_tokens=most)
    self._engine.submit([Job(tuple(ids), row_number(body["seed"], 0), settings, hear)])
    ended.wait()
    tokens = [token for part in parts for token in part.tokens]
    logprobs = [float(logprob) for part in parts for logprob in part.logprobs]
    return tokens, logprobs, parts[-1].finish == "stop"


class FakeSglang(FakeEngine):
  """Answers as SGLang 0.5.23 does, by its source.

  Attributes:
    is_original: Whether log-probs are those before the temperature.
    eos: Tokens at which it stops unasked, as at those of config.json.
  """

  engine = "sglang"

  def __init__(self, folder):
    self.is_original, self.eos = False, (1,)
    self._rng = np.random.default_rng(0)  # one for all rows: it reads no seed
    super().__init__(folder)

  def answer(self, path, body):
    self.calls.append(path)
    route = path.partition("?")[0]
    if route == "/model_info":
      return {"model_path": self.folder}
    if route == "/server_info":
      return {"dtype": "float32", "max_req_input_len": self.longest}
    if route == "/detokenize":
      return {"text": self.tokens.decode(body["tokens"])}
    if route == "/update_weights_from_disk":
      assert body["load_format"] == "auto"
      self.load(body["model_path"])
      return {"success": True, "message": "", "num_paused_requests": 0}
    if route == "/load_lora_adapter":
      if body["lora_name"] in self.adapters:
        raise Refusal(400, f"Failed to load LoRA adapter {body['lora_name']}: it is already loaded")
      self.adapters[body["lora_name"]] = body["lora_path"]
    if route == "/unload_lora_adapter":
      del self.adapters[body["lora_name"]]
    if route == "/generate":
      return {"text": "", "meta_info": self.generate(body)}
    return {}

  def generate(self, body):
    ids, name, sampling = body["input_ids"], body["lora_path"] or "", body["sampling_params"]
    if unknown := {*sampling} - SGLANG_SAMPLING:
      raise Refusal(400, f"unknown field `{unknown.pop()}`")
    if name and name not in self.adapters:
      raise Refusal(400, f"The following requested LoRA adapters are not loaded: {name}")
    if "logprob_start_len" in body:
      return self.likeliest(ids, name, sampling["temperature"])
    ends = []

    def stops_at(tokens):
      text = self.tokens.decode(tokens)
      texts = [stop for stop in sampling.get("stop", ()) if stop in text]
      ids = {*sampling.get("stop_token_ids", ()), *self.eos} & {tokens[-1]}
      ends[:] = texts or ([] if sampling.get("ignore_eos") else ids)
      return bool(ends)

    most, temperature = sampling["max_new_tokens"], sampling["temperature"]
    tokens, logprobs, _ = self.drawn(body, name, ids, most, temperature, self._rng, stops_at)
    if self.is_original:
      logprobs = self.scored(ids + tokens, name)[-len(tokens) :]
    reason = {"type": "stop", "matched": ends[0]} if ends else {"type": "length", "length": most}
    pairs = [[logprob, token, None] for logprob, token in zip(logprobs, tokens)]
    return {"output_token_logprobs": pairs, "finish_reason": reason}

  def likeliest(self, ids, name, temperature):
    """The log-probs of a prompt, and the two likeliest tokens that follow it."""
    given = [[logprob, token, None] for logprob, token in zip([None, *self.scored(ids, name)], ids)]
    logits_V = self.logits(ids, name)[-1] / (1.0 if self.is_original else temperature)
    top = [[float(logprob), 0, None] for logprob in np.sort(jax.nn.log_softmax(logits_V))[:-3:-1]]
    return {"input_token_logprobs": given, "output_top_logprobs": [top]}


SGLANG_SAMPLING = {
  *("max_new_tokens", "stop", "stop_token_ids", "temperature", "top_p", "top_k", "min_p"),
  *("frequency_penalty", "presence_penalty", "repetition_penalty", "ignore_eos"),
  *("skip_special_tokens", "sampling_seed"),
}


@contextlib.contextmanager
def serving(*folders, kind=FakeVllm):
  """A server for each of the folders."""
  servers = [kind(folder) for folder in folders]
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
