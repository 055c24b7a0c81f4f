"""An engine of others draws: what it is asked, what is believed, and what is said if it fails."""

import contextlib
import dataclasses
import json
from pathlib import Path
import threading
import time

from engine_server import LENGTH, FakeVllm, Refusal, serving
import jax
from lora_run_test import make_checkpoint
import numpy as np
import pytest
from small_run import G, P, T, small_config, small_run, with_reward, with_section

from grpo_jax.asynchronous.learner import Closed
from grpo_jax.engine import command, keep
from grpo_jax.engine.client import Client, Gone, Refused
from grpo_jax.engine.connect import Engine, check_facts
from grpo_jax.engine.drawn import DrawnFile
from grpo_jax.engine.groups import EngineGroups, Rules
from grpo_jax.engine.proof import what_is_wrong
from grpo_jax.engine.servers import Servers
from grpo_jax.engine.vllm import Ask, Drawn, Facts, VllmServer
from grpo_jax.engine.weights import Written
from grpo_jax.run.checks import check_config, corrected
from grpo_jax.sampler.flight import Prompts
from grpo_jax.sampler.logits import RowSettings
from grpo_jax.sampler.requests import GroupRequest
from grpo_jax.sampler.stop import end_at
from grpo_jax.settings import ConfigError, RunFailed
from grpo_jax.storage.reading import read_metrics
from grpo_jax.training.loop import run_steps

REWARD = """
def reward(completion_ids, **_):
  return [float(sum(ids) % 7) for ids in completion_ids]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return make_checkpoint(tmp_path_factory.mktemp("base") / "hf")


@pytest.fixture
def server(folder):
  with serving(folder) as servers:
    yield servers[0]


def config_for(folder, *servers, steps=2, **rollout):
  config = dataclasses.replace(with_section(small_config(), "model", path=folder), steps=steps)
  config = with_section(config, "checkpoint", every=1)
  urls = tuple(server.url for server in servers)
  given = dict(engine="vllm", engine_urls=urls, engine_timeout=60.0) | rollout
  return with_section(config, "rollout", **given)


def numbers(workdir):
  """The rows of a run without times."""
  return [
    {name: value for name, value in row.items() if not name.startswith(("time/", "perf/"))}
    for row in read_metrics(workdir)
  ]


def paths(server):
  return [path.partition("?")[0] for path in server.calls]


# A run.


def test_a_run_learns_from_what_servers_draw_and_is_replayed(folder, server, tmp_path):
  config = with_reward(config_for(folder, server), tmp_path, REWARD)
  run_steps(config, tmp_path / "drawn")
  rows = numbers(tmp_path / "drawn")
  assert len(rows) == 2
  for row in rows:
    assert row["sampler/logprob_gap_max"] < 1e-4
    assert row["correction/raw_mean"] == pytest.approx(1, abs=1e-4)
  assert paths(server).count("/v1/completions") == 3 + 2 * P * G  # a rehearsal and two proofs
  assert not list((tmp_path / "drawn" / "engine").iterdir())  # no folder is left
  server.stop()  # another run needs no engine
  replay = str(tmp_path / "drawn" / "drawn.jsonl")
  again = with_section(config, "rollout", engine_urls=(), replay=replay)
  run_steps(again, tmp_path / "again")
  assert numbers(tmp_path / "again") == rows
  longer = dataclasses.replace(again, steps=3)
  with pytest.raises(RunFailed, match="does not have a group that this run draws"):
    run_steps(longer, tmp_path / "longer")


def test_batches_are_drawn_ahead(folder, server, tmp_path):
  config = config_for(folder, server, steps=3, max_staleness=1)
  run_steps(config, tmp_path)
  assert [row["staleness/max"] for row in read_metrics(tmp_path)] == [0, 1, 1]
  assert all(row["sampler/logprob_gap_max"] < 2 for row in read_metrics(tmp_path))


# Servers, without a model.


class Stub:
  """A server in this process: row n of a call gets tokens n, n + 1, ... of its seed."""

  def __init__(self, url="http://a", answers=True):
    self.url, self.is_up, self.answers = url, True, answers
    self.scores, self.asked, self.draws = [[0.0]], [], threading.Event()
    self.draws.set()

  def is_there(self):
    if not self.is_up:
      raise Gone(f"{self.url} does not answer")

  def drop(self):
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
    return Drawn(kept, [-0.5] * len(kept), stop is not None)


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
    assert len(path.read_bytes().splitlines()) == 2
    stub.asked.clear()
    newer = groups_of(servers, path, feed=lambda: ("w", 1))  # other weights draw
    played(newer, [request(0)])
    assert len(stub.asked) == 2


def test_a_damaged_record_is_one_line(tmp_path):
  (tmp_path / "d").write_text("what\n")
  with pytest.raises(ConfigError, match="line 1 does not say what was drawn"):
    DrawnFile(tmp_path / "d")
  (tmp_path / "d").write_text('{"group": "a", "version": 0, "rows": [[{"tokens": [1]}]]}\n')
  with pytest.raises(RunFailed, match="move the file away"):
    DrawnFile(tmp_path / "d").find("a", 0)
  with pytest.raises(ConfigError, match="rollout.replay is 'nowhere': there is no such file"):
    DrawnFile(tmp_path / "e", "nowhere")


def test_servers_share_groups(tmp_path):
  a, b = Stub("http://a"), Stub("http://b")
  with sharing(a, b) as servers:
    played(groups_of(servers, tmp_path / "d"), [request(n) for n in range(8)])
    assert len(a.asked) + len(b.asked) == 16 and a.asked and b.asked


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
  with sharing(Stub(answers=Refused("http://a answers 400: too long", 400))) as servers:
    with pytest.raises(RunFailed, match="too long"):
      played(groups_of(servers, tmp_path / "d"), [request(0)])
  with sharing(Stub(answers=Gone("http://a did not answer within 9 seconds"))) as servers:
    with pytest.raises(RunFailed, match="5 servers went away while they drew a row.*9 seconds"):
      played(groups_of(servers, tmp_path / "e"), [request(0)])


def test_a_server_without_the_weights_is_noticed(tmp_path):
  stub = Stub()
  with sharing(stub) as servers:
    servers.use(written("first"))
    with pytest.raises(RunFailed, match="differ from this run's by 0.3 .*restart it"):
      servers.use(written("second", -0.3))
  with sharing(stub) as servers:
    servers.use(written("first"))
    with pytest.raises(RunFailed, match="to the last bit those under the weights before"):
      servers.use(written("second", -1e-6))


def test_what_is_wrong_with_weights():
  ours, theirs = np.array([[-1.0, -2.0]]), [[-1.0, -2.0]]
  assert what_is_wrong(ours, theirs, None, 1e-3) == ""
  assert what_is_wrong(ours, theirs, (ours, theirs), 1e-3) == ""  # the same weights again
  assert what_is_wrong(ours, [[-1.0, -2.0001]], (ours - 1, theirs), 1e-3) == ""
  assert "0.5 on average" in what_is_wrong(ours, [[-2.0, -2.0]], None, 1e-3)
  assert "nan" in what_is_wrong(ours, [[np.nan, -2.0]], None, 1e-3)


def test_a_run_that_is_asked_to_stop_does_not_wait_for_servers():
  stub = Stub()
  stub.is_up = False
  with sharing(stub, should_stop=lambda: True) as servers, pytest.raises(Closed, match="no server"):
    servers.use(written("w"))
