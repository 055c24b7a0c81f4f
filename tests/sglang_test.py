"""SGLang draws: what it is asked, what is believed. A server of the tests stands for it.

SGLANG_SOURCE=FOLDER names a folder of `pip install --no-deps --target=FOLDER sglang msgspec`. Then
a test reads the requests with SGLang's own code.
"""

import importlib.util
import os
from pathlib import Path
import sys

from engine_server import LENGTH, SGLANG_SAMPLING, FakeSglang, Refusal, serving
from lora_run_test import make_checkpoint
import numpy as np
import pytest
from small_run import small_config, with_section

from grpo_jax.engine.client import Client, ServerGone, ServerRefused
from grpo_jax.engine.connect import check_facts
from grpo_jax.engine.engines import ENGINES, line
from grpo_jax.engine.server import Ask, Facts
from grpo_jax.engine.sglang import SglangServer, command, environment
from grpo_jax.run.checks import check_config
from grpo_jax.settings import ConfigError

ASK = Ask([3, 4], 6, 0.5, 7, (1,), ())
URL = "http://10.0.0.7:8001"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return make_checkpoint(tmp_path_factory.mktemp("base") / "hf")


@pytest.fixture
def server(folder):
  with serving(folder, kind=FakeSglang) as servers:
    yield servers[0]


def client_of(server):
  return SglangServer(Client(server.url), 60.0)


def logprobs_of(server, row, temperature):
  """The log-probs of a row's tokens from the second on, by hand."""
  logits_NV = server.logits(row, "")[:-1] / temperature
  logprobs_NV = logits_NV - np.log(np.exp(logits_NV).sum(-1, keepdims=True))
  return logprobs_NV[np.arange(len(row) - 1), row[1:]]


def test_a_server_is_asked_for_tokens_and_scores(server):
  sglang, seen = client_of(server), []
  server.before = seen.append
  drawn = sglang.draw(ASK)
  row = [3, 4, *drawn.tokens]
  np.testing.assert_allclose(drawn.logprobs, logprobs_of(server, row, 0.5)[1:], atol=1e-5)
  np.testing.assert_allclose(sglang.score([row])[0], logprobs_of(server, row, 1.0), atol=1e-5)
  sampling = seen[0]["sampling_params"]
  assert {"top_p": 1.0, "top_k": -1, "stop_token_ids": [1]}.items() <= sampling.items()
  assert seen[0]["lora_path"] is None and "ignore_eos" not in sampling  # it ignores all stops
  assert sglang.facts() == Facts("float32", LENGTH, "processed_logprobs", False, server.folder)
  assert sglang.text(5) == server.tokens.decode([5])


def test_sglangs_own_code_knows_every_key_of_a_request(server, monkeypatch):
  source = os.environ.get("SGLANG_SOURCE")
  if not source:
    pytest.skip("set SGLANG_SOURCE to the folder of SGLang's package and of msgspec")
  monkeypatch.syspath_prepend(source)
  file = Path(source, "sglang", "api", "v1", "api_types.py")  # of 0.5.23, without its other modules
  spec = importlib.util.spec_from_file_location("sglang_api_types", file)
  types = importlib.util.module_from_spec(spec)
  monkeypatch.setitem(sys.modules, spec.name, types)
  spec.loader.exec_module(types)
  sglang, seen, answer = client_of(server), [], server.generate
  monkeypatch.setattr(server, "generate", lambda body: seen.append(body) or answer(body))
  for temperature in (0.0, 0.7):
    sglang.draw(ASK._replace(temperature=temperature, stop=("x",)))
  sglang.score([[3, 4, 5]])
  seen.append(seen[0] | {"lora_path": "a"})
  for body in seen:
    request = types.GenerateRequest.from_json_value(body)  # refuses settings that it does not know
    assert {*body} <= {*request.__struct_fields__}  # and passes over other keys
  assert {*types.SamplingParams.__struct_fields__} >= SGLANG_SAMPLING
  types.GenerateRequest.from_json_value({"odd": 1})
  with pytest.raises(types.JsonContractError, match="unknown field `odd`"):
    types.GenerateRequest.from_json_value({"sampling_params": {"odd": 1}})


def test_a_row_goes_on_after_a_token_that_only_the_server_takes_for_an_end(server):
  server.eos, seen = [0, *range(2, 99)], []
  server.before = seen.append
  drawn = client_of(server).draw(ASK)
  assert len(seen) == len(drawn.tokens) > 1  # it stops at each
  prompts = [[3, 4, *drawn.tokens[:n]] for n in range(len(seen))]
  assert [body["input_ids"] for body in seen] == prompts
  assert [body["sampling_params"]["max_new_tokens"] for body in seen] == [
    *range(6, 6 - len(seen), -1)
  ]
  assert drawn.has_stopped == (drawn.tokens[-1] == 1)
  scores = logprobs_of(server, [3, 4, *drawn.tokens], 0.5)
  np.testing.assert_allclose(drawn.logprobs, scores[1:], atol=1e-5)


def test_stop_ids_and_texts_end_a_row(server):
  sglang = client_of(server)
  all_ids = sglang.draw(ASK._replace(stop_ids=range(99)))
  assert len(all_ids.tokens) == 1 and all_ids.has_stopped
  texts = [server.tokens.decode([token]) for token in range(2, 12)]
  of_texts = sglang.draw(ASK._replace(stop=texts, most=20))
  assert of_texts.has_stopped


def test_log_probs_from_before_the_temperature_are_refused(server):
  server.is_original = True
  with pytest.raises(ServerRefused, match="before the temperature.*RETURN_ORIGINAL_LOGPROB=0"):
    client_of(server).score([[3, 4, 5], [6, 7, 8]])


@pytest.mark.parametrize(
  "change, error, reason",
  [
    ({"output_token_logprobs": [[-1.0, 2, None]] * 7}, ServerRefused, "asked for 1 to 6 token ids"),
    ({"output_token_logprobs": [[-1.0, None, None]]}, ServerRefused, "asked for 1 to 6 token ids"),
    ({"output_token_logprobs": None}, ServerRefused, "drew None, and was asked"),
    ({"output_token_logprobs": [[None, 2, None]] * 6}, ServerRefused, "6 tokens with log-probs"),
    ({"output_token_logprobs": [[-1.0, 2, None]]}, ServerRefused, "after 1 tokens, for 'length'"),
    ({"finish_reason": {"type": "abort", "message": "Aborted"}}, ServerGone, "dropped a row"),
  ],
)
def test_an_answer_that_cannot_be_right_is_refused(server, monkeypatch, change, error, reason):
  good = {"output_token_logprobs": [[-1.0, 2, None]] * 6, "finish_reason": {"type": "length"}}
  monkeypatch.setattr(server, "generate", lambda body: good | change)
  with pytest.raises(error, match=reason):
    client_of(server).draw(ASK)


@pytest.mark.parametrize(
  "change",
  [{"input_token_logprobs": [[-1.0, 3, None]]}, {"output_top_logprobs": []}],
)
def test_scores_that_cannot_be_right_are_refused(server, monkeypatch, change):
  score = server.likeliest
  monkeypatch.setattr(server, "likeliest", lambda *arguments: score(*arguments) | change)
  with pytest.raises(ServerRefused, match="scored a row"):
    client_of(server).score([[3, 4, 5]])


def test_weights_are_loaded_before_the_cache_is_flushed(server):
  client_of(server).load("new")
  assert server.loaded == "new"
  assert server.calls == ["/update_weights_from_disk", "/flush_cache?timeout=30"]

  def refuse(path, body):
    raise Refusal(400, "Failed to update weights")

  server.answer = refuse
  with pytest.raises(ServerRefused, match="/update_weights_from_disk with 400: Failed to update"):
    client_of(server).load("newer")


def test_adapters_whose_answer_was_lost_are_loaded_once(server):
  sglang = client_of(server)
  sglang.add_adapters("a", "own")
  sglang.add_adapters("a", "own")
  server.adapters["b"] = "others"
  with pytest.raises(ServerRefused, match="already loaded"):
    sglang.add_adapters("b", "own")
  sglang.remove_all_adapters()
  assert not server.adapters


def test_a_server_with_other_settings_is_refused(server):
  facts = client_of(server).facts()
  config = with_section(small_config(), "rollout", engine="sglang")
  check_facts(URL, facts, config)
  wanted = "has room for 17 tokens: start it with --context-length 24"
  with pytest.raises(ServerRefused, match=wanted):
    check_facts(URL, facts._replace(longest=17), config)
  server.answer = lambda path, body: {"version": "0.1"}
  with pytest.raises(
    ServerRefused, match="does not say dtype and max_req_input_len at /server_info"
  ):
    client_of(server).facts()


def test_the_command_starts_what_the_run_asks_for():
  config = with_section(small_config(), "model", path="hf", dtype="bfloat16")
  config = with_section(config, "rollout", engine="sglang", engine_tensor=2)
  words = command(config, URL)
  assert line(environment(config, False), words) == (
    "SGLANG_RETURN_ORIGINAL_LOGPROB=0 SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 python -m"
    " sglang.launch_server --model-path hf --host 10.0.0.7 --port 8001 --dtype bfloat16"
    " --context-length 24 --tp-size 2 --load-format dummy"
  )
  again = command(config, URL, "weights", program="/venv/python")
  assert again[0] == "/venv/python" and "weights" in again and "dummy" not in again
  lora = with_section(config, "lora", rank=9, targets=("q_proj", "v_proj"))
  assert command(lora, URL)[-7:] == [
    *("2", "--enable-lora", "--max-lora-rank", "9"),
    *("--lora-target-modules", "q_proj", "v_proj"),
  ]
  with_tokenizer = with_section(config, "data", tokenizer="other")
  assert "--tokenizer-path other" in " ".join(command(with_tokenizer, URL))


def test_the_config_names_the_engines_that_there_are():
  names = ", ".join(map(repr, ["", *ENGINES]))
  with pytest.raises(ConfigError, match=f"rollout.engine is 'other'.*{names}"):
    check_config(with_section(small_config(), "rollout", engine="other"))


def test_adapters_that_sglang_scales_otherwise_are_refused():
  config = with_section(small_config(), "model", path="somewhere")
  config = with_section(config, "lora", rank=4, rslora=True)
  config = with_section(config, "rollout", engine="vllm", engine_urls=(URL,))
  check_config(config)
  with pytest.raises(ConfigError, match="lora.rslora is True: SGLang scales .* set False"):
    check_config(with_section(config, "rollout", engine="sglang"))
