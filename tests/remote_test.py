"""Sampler processes: what they draw for a run is what the run would draw itself."""

from collections import deque
import contextlib
import dataclasses
import functools
import json
import math
import os
from pathlib import Path
from random import Random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types
import zlib

from experts_test import make_folder
import jax
import jax.numpy as jnp
from lora_run_test import make_checkpoint
import ml_dtypes
import numpy as np
import pytest
from small_run import (
  G,
  P,
  T,
  small_config,
  small_run,
  with_reward,
  with_section,
)
from small_vision import vision_config

import grpo_jax
from grpo_jax.asynchronous import contents, handshake, learner, messages, sampler
from grpo_jax.asynchronous.access import OPEN
from grpo_jax.asynchronous.contents import CompletionLimits, limits_of
from grpo_jax.asynchronous.learner import RemoteSampler, SamplingClosed, given
from grpo_jax.asynchronous.messages import BadMessage, Connection, Message
from grpo_jax.asynchronous.parts import DrawnPart
from grpo_jax.asynchronous.remote_groups import RemoteGroups
from grpo_jax.asynchronous.sampler import Drawer, sample_for
from grpo_jax.asynchronous.terms import abstract_weights, difference, terms_of
from grpo_jax.asynchronous.versions import KeptVersions
from grpo_jax.console.exit_codes import Stopped
from grpo_jax.data import loader
from grpo_jax.evaluation.policy import policy_of_run
from grpo_jax.rollouts.complete import make_rollout
from grpo_jax.sampler.filters import FILTERS
from grpo_jax.sampler.flight import Prompts
from grpo_jax.sampler.requests import GroupRequest
from grpo_jax.sampler.sampling import Draws, whole
from grpo_jax.scoring.scorers import Scorers
from grpo_jax.settings import ConfigError, RunFailed
from grpo_jax.storage.reading import read_completions, read_metrics
from grpo_jax.training.loop import run_steps
from grpo_jax.types import Completions

TERMS = {"config key seed": 1}
LIMITS = CompletionLimits(vocabulary=100, tokens=T)
REWARD = """
def reward(completion_ids, **_):
  return [float(sum(ids) % 7) for ids in completion_ids]
"""


@pytest.fixture
def hub():
  """A learner's side, on a free port."""
  with listening() as sampler:
    yield sampler


@contextlib.contextmanager
def listening(**settings):
  terms, limits = settings.pop("terms", TERMS), settings.pop("limits", LIMITS)
  sampler = RemoteSampler(("127.0.0.1", 0), terms, limits, **settings)
  try:
    yield sampler
  finally:
    sampler.close()
    PROCESSES.clear()


def address_of(sampler):
  host, _, port = sampler.address.rpartition(":")
  return host, int(port)


def free_port():
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    return s.getsockname()[1]


def some_completions(count, tokens=T):
  """Rows that were cut off after so many tokens."""
  row = (count, G, tokens)
  logprobs_PGT = -np.random.default_rng(0).random(row, np.float32)
  return Completions(
    tokens_PGT=np.full(row, 7, np.int32),
    lengths_PG=np.full(row[:2], tokens, np.int32),
    sampled_PGT=np.ones(row, bool),
    logprobs_PGT=logprobs_PGT,
    behavior_logprobs_PGT=logprobs_PGT,
    stopped_by_PG=np.full(row[:2], -1, np.int32),
  )


PROCESSES = []  # their connections stay open while the learner listens


class Process:
  """A sampler process without a model: the tokens of a completion are those of its prompt."""

  def __init__(self, sampler, terms=TERMS, access=OPEN):
    self.connection = Connection(handshake.join(address_of(sampler), access))
    self.connection.send("hello", {"terms": terms})
    self.answer = self.connection.receive(0)
    self.leaves, self.weights, self.drawn, self.sent = {}, {}, [], []
    PROCESSES.append(self)

  def next(self):
    """The next message that is no sign of life."""
    while (message := self.connection.receive(2**30)).kind == "alive":
      self.connection.send("alive")
    return message

  def asked(self):
    """What is to be drawn, after the weights for it."""
    while (message := self.next()).kind == "weights":
      self.take(message)
    assert message.kind == "draw"
    return message

  def take(self, message):
    fields = message.fields
    self.sent.append(sorted(message.arrays))
    self.leaves |= {fields["leaves"][int(place)]: x for place, x in message.arrays.items()}
    self.weights[fields["version"]] = [self.leaves[number] for number in fields["leaves"]]
    self.weights = {version: self.weights[version] for version in fields["keep"]}

  def send(self, asked, prompts):
    members = asked.fields["members"]
    tokens_PGT = asked.arrays["prompts_PS"][prompts][:, None].repeat(members, 1)
    completions = some_completions(len(prompts)).replace(tokens_PGT=tokens_PGT)
    self.connection.send("finished", {"prompts": prompts}, given(completions))

  def serve(self, calls=1):
    """Draws so many parts in a thread."""

    def serve():
      try:
        for _ in range(calls):
          asked = self.asked()
          self.drawn.append(asked)
          count = len(asked.arrays["prompts_PS"])
          self.send(asked, [count - 1])
          self.send(asked, [*range(count - 1)])
      except OSError:
        pass  # the other side has ended

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


def call(sampler, params=None, prompts=P):
  """The parts of a call, as they arrive. It begins at once."""
  prompts_PS = np.arange(prompts * T, dtype=np.int32).reshape(prompts, T)
  draws = Draws(jax.random.key(3))
  params = {"a": jnp.ones(2)} if params is None else params
  return arriving(sampler.begin(params, prompts_PS, np.full(prompts, T, np.int32), G, draws))


def arriving(begun):
  try:
    while begun.left:
      yield begun.next(math.inf)
  finally:
    begun.close()


def assert_whole(parts, prompts=P):
  assert sorted(p for part in parts for p in part.prompts) == [*range(prompts)]
  expected_PGT = np.arange(prompts * T).reshape(prompts, 1, T).repeat(G, 1)
  np.testing.assert_array_equal(whole(parts).tokens_PGT, expected_PGT)


def accepted_at(server):
  """The learner's side of a connection that its sampler has proven."""
  return Connection(handshake.accept(server.accept()[0], OPEN))


def pair():
  """Two ends of a connection, the second one as it is."""
  server = socket.create_server(("127.0.0.1", 0))
  other = socket.create_connection(server.getsockname())
  connected, _ = server.accept()
  server.close()
  return Connection(connected), other


def test_a_message_arrives_as_it_was_sent():
  ours, other = pair()
  arrays = {
    "floats": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    "bfloat16": np.asarray([1.5, -2, 3e38], ml_dtypes.bfloat16),
    "int8": np.arange(-128, 128).astype(np.int8),
    "int4": np.arange(-8, 8).astype(ml_dtypes.int4),
    "flags": np.array([[True, False]]),
    "number": np.array(7, np.uint32),
    "none": np.zeros((3, 0), np.int32),
  }
  fields = {"a": [1, None, "ä"], "b": 0.1}
  ours.send("kind", fields, arrays)
  got = Connection(other).receive(2**20)
  assert (got.kind, got.fields, [*got.arrays]) == ("kind", fields, [*arrays])
  for name, array in arrays.items():
    assert (got.arrays[name].dtype, got.arrays[name].shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(got.arrays[name], array)


def header(values, length=None):
  text = values if isinstance(values, bytes) else json.dumps(values).encode()
  size = struct.pack("!I", len(text) if length is None else length)
  return b"".join(x + struct.pack("!I", zlib.crc32(x)) for x in (size, text))


def with_arrays(*arrays):
  return header({"kind": "hello", "fields": {}, "arrays": arrays})


HOSTILE = {
  "a long header": (header(b"", length=2**32 - 1), "a header of 4294967295 bytes"),
  "no json": (header(b"\xff{{{"), "makes no sense"),
  "deep json": (header(b"[" * 100_000), "makes no sense"),
  "no object": (header([1]), "makes no sense"),
  "no kind": (header({"fields": {}, "arrays": []}), "makes no sense"),
  "large arrays": (with_arrays(("x", "float32", [2**40])), "4398046511104 bytes"),
  "arrays of nothing": (with_arrays(("x", "int32", [0, 2**47, 2**47, 2**47])), "makes no sense"),
  "arrays of the largest size": (with_arrays(("x", "int32", [2**62, 2**62])), "makes no sense"),
  "a size of a float": (with_arrays(("x", "int32", [1e400])), "makes no sense"),
  "a name twice": (with_arrays(("x", "int32", [0]), ("x", "int32", [0])), "makes no sense"),
  "an array of four": (with_arrays(("x", "int32", [0], 1)), "makes no sense"),
  "a dtype that is a list": (with_arrays(("x", ["int32"], [0])), "makes no sense"),
  "a negative size": (with_arrays(("x", "float32", [-1, -(2**40)])), "makes no sense"),
  "objects": (with_arrays(("x", "object", [1])), "makes no sense"),
  "another message": (header({"kind": "draw", "fields": {}, "arrays": []}), "of kind 'draw'"),
  "no terms": (header({"kind": "hello", "fields": {}, "arrays": []}), "did not say"),
}


@pytest.mark.parametrize("data, why", HOSTILE.values(), ids=HOSTILE)
def test_hostile_bytes_end_their_connection_and_not_the_run(hub, capfd, data, why):
  with handshake.join(address_of(hub), OPEN) as hostile:
    hostile.sendall(data)
    with contextlib.suppress(ConnectionResetError):
      while hostile.recv(1000):
        pass
  process = Process(hub)
  process.serve()
  assert_whole([*call(hub)])
  lines = [line for line in capfd.readouterr().err.splitlines() if "sent away" in line]
  assert len(lines) == 1 and why in lines[0]


@pytest.mark.parametrize(
  "fields, change",
  [
    ({"prompts": [P]}, {}),
    ({"prompts": [0.0]}, {}),
    ({"prompts": "all"}, {}),
    ({"prompts": [0, 1]}, {}),
    ({"prompts": [0, 0]}, {}),
    ({"prompts": [0]}, {"other": np.zeros(1, np.int32)}),
  ],
)
def test_completions_of_another_shape_are_not_taken(hub, capfd, fields, change):
  wrong = Process(hub)

  def send():
    wrong.asked()
    with contextlib.suppress(OSError):  # it may be sent away before it has sent all
      wrong.connection.send("finished", fields, given(some_completions(1)) | change)
    Process(hub).serve()

  thread = threading.Thread(target=send)
  thread.start()
  assert_whole([*call(hub)])
  thread.join()
  assert "sent away: it sent" in capfd.readouterr().err


def replaced(name, place, value):

  def change(arrays):
    arrays[name][place] = value

  return change


def as_dtype(name, dtype):
  def change(arrays):
    arrays[name] = arrays[name].astype(dtype)

  return change


def with_array(name, array):
  def change(arrays):
    arrays[name] = array

  return change


def longer(arrays):
  arrays |= given(some_completions(P, T + 1))


def half(arrays):
  arrays["lengths_PG"] //= 2


def without_a_token(arrays):
  arrays["lengths_PG"][:] = 0


WRONG = {
  "an id beyond the vocabulary": (replaced("tokens_PGT", 0, 10**6), "tokens_PGT with 1000000"),
  "a negative id": (replaced("tokens_PGT", 0, -1), "tokens_PGT with -1"),
  "tokens as floats": (as_dtype("tokens_PGT", np.float32), "tokens_PGT as float32"),
  "tokens of 64 bits": (as_dtype("tokens_PGT", np.int64), "tokens_PGT as int64"),
  "nan": (replaced("logprobs_PGT", 1, np.nan), "logprobs_PGT with nan"),
  "infinity": (replaced("behavior_logprobs_PGT", 1, -np.inf), "behavior_logprobs_PGT with -inf"),
  "a probability above 1": (replaced("logprobs_PGT", 1, 0.5), "logprobs_PGT with 0.5"),
  "a negative length": (replaced("lengths_PG", 0, -3), "lengths_PG with -3"),
  "a length beyond T": (replaced("lengths_PG", 0, T + 1), f"lengths_PG with {T + 1}"),
  "a row of no token": (without_a_token, "lengths_PG with 0"),
  "lengths without their tokens": (half, "sampled_PGT that is not true"),
  "tokens of others": (replaced("sampled_PGT", 0, False), "sampled_PGT that is not true"),
  "another T": (longer, f"of shape ({P}, {G}, {T + 1})"),
  "another stop": (replaced("stopped_by_PG", 0, 9), "stopped_by_PG that is not the last"),
  "versions": (with_array("versions_PGT", np.zeros((P, G, T), np.int32)), "sent 'versions_PGT'"),
  "experts": (with_array("experts_PGTY", np.zeros((P, G, T, 2), np.int8)), "sent 'experts_PGTY'"),
  "no log-probs": (lambda arrays: arrays.pop("logprobs_PGT"), "left out 'logprobs_PGT'"),
  "members": (with_array("lengths_PG", np.ones((P, G + 1), np.int32)), f"shape ({P}, {G + 1})"),
  "an axis more": (with_array("lengths_PG", np.ones((P, G, 1), np.int32)), f"({P}, {G}, 1)"),
}  # fmt: skip


@pytest.mark.parametrize("change, why", WRONG.values(), ids=WRONG)
def test_what_no_policy_draws_is_not_taken_and_another_process_draws_it(hub, capfd, change, why):
  wrong, parts = Process(hub), []
  coming = threading.Thread(target=lambda: parts.extend(call(hub)))
  coming.start()
  wrong.asked()
  arrays = jax.tree.map(np.copy, given(some_completions(P)))
  change(arrays)
  with contextlib.suppress(OSError):  # it may be sent away before it has sent all
    wrong.connection.send("finished", {"prompts": [*range(P)]}, arrays)
    refused = wrong.next()
    assert refused.kind == "refused" and why in refused.fields["why"]
  assert parts == []
  Process(hub).serve()
  coming.join()
  assert_whole(parts)
  (said,) = [line for line in capfd.readouterr().err.splitlines() if "sent away" in line]
  assert said.startswith("the process at 127.0.0.1:") and why in said and len(said) < 300


def test_rows_that_end_before_the_limit_are_taken():
  completions = some_completions(2)
  tokens_PGT, is_token_PGT = completions.tokens_PGT.copy(), np.arange(T) < 3
  tokens_PGT[..., 2] = 0
  short = {
    name: np.where(is_token_PGT, x, 0).astype(x.dtype) if "PGT" in name else x
    for name, x in given(completions.replace(tokens_PGT=tokens_PGT)).items()
  }
  short |= {"lengths_PG": np.full((2, G), 3, np.int32), "stopped_by_PG": np.zeros((2, G), np.int32)}
  part = contents.PartRequest(P, T, G, longest=T, keeps_experts=False)
  made = contents.completions(short, part, LIMITS)
  assert (made.lengths_PG == 3).all()
  for name in ("tokens_PGT", "logprobs_PGT", "behavior_logprobs_PGT"):
    padded = short | {name: given(completions)[name]}
    with pytest.raises(BadMessage, match=f"{name} that is not 0 at padding"):
      contents.completions(padded, part, LIMITS)
  cut = short | {"stopped_by_PG": np.full((2, G), -1, np.int32)}
  with pytest.raises(BadMessage, match="stopped_by_PG"):
    contents.completions(cut, part, LIMITS)
  made = contents.completions(cut, part._replace(longest=3), LIMITS)
  assert (made.stopped_by_PG == -1).all()


def test_experts_are_those_of_the_model():
  limits = LIMITS._replace(experts=4, experts_in_all=2)
  part = contents.PartRequest(P, 6, G, longest=T, keeps_experts=True)
  arrays = given(some_completions(P)) | {
    "experts_PGTY": np.full((P, G, T, 2), 3, np.int8),
    "prompt_experts_PSY": np.full((P, 6, 2), -1, np.int8),
  }
  assert contents.completions(arrays, part, limits).experts_PGTY.max() == 3
  for wrong, value in (("experts_PGTY", 4), ("prompt_experts_PSY", -2)):
    changed = arrays | {wrong: np.full_like(arrays[wrong], value)}
    with pytest.raises(BadMessage, match=f"{wrong} with {value}"):
      contents.completions(changed, part, limits)
  shapes = contents._answer(part.prompts, part, limits)
  assert messages.bytes_of(shapes) == sum(x.nbytes for x in arrays.values())


def test_more_bytes_than_were_asked_for_are_not_read(hub, capfd):
  wrong, parts = Process(hub), []
  coming = threading.Thread(target=lambda: parts.extend(call(hub)))
  coming.start()
  wrong.asked()
  large = [("tokens_PGT", "int32", [P, G, 2**30])]
  with contextlib.suppress(OSError):
    wrong.connection._socket.sendall(
      header({"kind": "finished", "fields": {"prompts": [0]}, "arrays": large})
    )
  Process(hub).serve()
  coming.join()
  assert_whole(parts)
  assert "other arrays than those of completions" in capfd.readouterr().err


def test_weights_that_are_not_finite_are_named_and_nobody_waits(hub, capfd):
  wrong = Process(hub)

  def send():
    wrong.asked()
    arrays = given(some_completions(P)) | {"logprobs_PGT": np.full((P, G, T), np.nan, np.float32)}
    wrong.connection.send("finished", {"prompts": [*range(P)]}, arrays)

  threading.Thread(target=send, daemon=True).start()
  with pytest.raises(RunFailed, match="the weights are not finite"):
    [*call(hub, {"a": jnp.array([1.0, jnp.nan])})]
  assert "logprobs_PGT with nan" in capfd.readouterr().err


def test_weights_with_which_every_sampler_draws_nan_end_the_run(hub, capfd):
  """They are finite, and what is computed with them is not."""

  def send():
    for _ in range(3):
      process = Process(hub)
      process.asked()
      arrays = given(some_completions(P))
      arrays |= {"logprobs_PGT": np.full((P, G, T), np.nan, np.float32)}
      process.connection.send("finished", {"prompts": [*range(P)]}, arrays)

  threading.Thread(target=send, daemon=True).start()
  with pytest.raises(
    RunFailed, match="3 samplers were sent away for what .*: it sent logprobs_PGT"
  ):
    [*call(hub, {"a": jnp.array([1.0, 3e38])})]
  assert capfd.readouterr().err.count("was sent away") == 3


def test_a_header_that_comes_byte_by_byte_is_not_waited_for(hub, monkeypatch, capfd):
  monkeypatch.setattr(messages, "_SILENCE", 0.3)
  with handshake.join(address_of(hub), OPEN) as slow, contextlib.suppress(OSError):
    for byte in with_arrays():
      slow.send(bytes([byte]))
      time.sleep(0.05)
  assert "timed out in the middle of a message" in capfd.readouterr().err


def test_a_part_is_drawn_again_when_its_process_goes_and_handed_on_once(hub):
  first, coming, asked = Process(hub), call(hub), []

  def begin():
    asked.append(first.asked())
    first.send(asked[0], [2])

  thread = threading.Thread(target=begin)
  thread.start()
  parts = [next(coming)]
  thread.join()
  first.connection.end()
  second = Process(hub)
  second.serve()
  parts += coming
  assert parts[0].prompts == [2]
  assert_whole(parts)
  # All of the part is drawn again, so that sums are rounded as before.
  for name, array in asked[0].arrays.items():
    np.testing.assert_array_equal(second.drawn[0].arrays[name], array)


def test_a_silent_process_loses_its_part(hub, monkeypatch, capfd):
  monkeypatch.setattr(messages, "_SILENCE", 0.3)
  monkeypatch.setattr(learner, "BEAT", 0.1)
  silent, parts = Process(hub), []
  coming = threading.Thread(target=lambda: parts.extend(call(hub)))
  coming.start()
  silent.asked()
  monkeypatch.setattr(messages, "_SILENCE", 60)
  Process(hub).serve()
  coming.join()
  assert_whole(parts)
  assert "timed out" in capfd.readouterr().err


def test_a_slow_process_that_shows_signs_of_life_is_waited_for(hub, monkeypatch):
  monkeypatch.setattr(learner, "BEAT", 0.02)
  slow = Process(hub)
  heard = []

  def serve():
    asked, until = slow.asked(), time.monotonic() + 0.5
    while time.monotonic() < until:
      heard.append(slow.connection.receive(0).kind)
      slow.connection.send("alive")
    slow.send(asked, [*range(P)])
    slow.serve(calls=1)

  threading.Thread(target=serve, daemon=True).start()
  assert_whole([*call(hub)])
  assert_whole([*call(hub)])
  assert len(heard) > 5 and {*heard} == {"alive"}


def test_signs_of_life_do_not_wait_for_answers(hub, monkeypatch):
  """Both sides send them by themselves. They come while a part is drawn, and while none is."""
  monkeypatch.setattr(learner, "BEAT", 0.02)
  process = Process(hub)
  kinds = [process.connection.receive(0).kind for _ in range(5)]
  assert {*kinds} == {"alive"}
  drawing = threading.Thread(target=lambda: [*call(hub)])
  drawing.start()
  asked = process.asked()
  for _ in range(5):
    process.connection.send("alive")
  assert process.connection.receive(0).kind == "alive"
  process.send(asked, [*range(P)])
  drawing.join()


def test_a_batch_is_split_into_the_parts_of_the_config():
  with listening(parts=2) as hub:
    processes = Process(hub), Process(hub)
    threads = [process.serve() for process in processes]
    assert_whole([*call(hub)])
    for thread in threads:
      thread.join()
    drawn = [asked for process in processes for asked in process.drawn]
    assert sorted(asked.fields["first_prompt"] for asked in drawn) == [0, P // 2]


def test_one_process_draws_all_parts_if_no_other_is_there():
  with listening(parts=2) as hub:
    process = Process(hub)
    process.serve(calls=2)
    assert_whole([*call(hub)])


def test_a_call_that_nobody_waits_for_is_not_drawn_again(hub):
  process, coming, asked = Process(hub), call(hub), []

  def begin():
    asked.append(process.asked())
    process.send(asked[0], [0])

  thread = threading.Thread(target=begin)
  thread.start()
  next(coming)
  thread.join()
  coming.close()
  process.connection.end()
  other = Process(hub)
  other.connection._socket.settimeout(0.3)
  with pytest.raises(TimeoutError):
    other.asked()


def test_weights_are_sent_once_and_outlive_an_update(hub):
  process = Process(hub)
  base, trained = jnp.arange(3.0), jnp.ones(2, jnp.bfloat16)
  update = jax.jit(lambda x: x + 1, donate_argnums=0)
  process.serve(calls=3)
  kept = hub.weights({"base": base, "trained": trained})
  after = update(trained)
  later = hub.weights({"base": base, "trained": after})
  assert kept.leaves[0] is later.leaves[0]
  assert_whole([*call(hub, kept)])
  assert process.sent[0] == ["0", "1"]
  assert process.weights[kept.version][1].dtype == trained.dtype
  assert (process.weights[kept.version][1] == 1).all()
  assert_whole([*call(hub, later)])
  assert process.sent == [["0", "1"], ["1"]] and (process.weights[later.version][1] == 2).all()
  assert process.weights[later.version][0] is process.weights[kept.version][0]
  assert_whole([*call(hub, later)])
  assert process.sent == [["0", "1"], ["1"]]
  assert [asked.fields["version"] for asked in process.drawn] == [
    kept.version,
    later.version,
    later.version,
  ]


def values_of(process):
  """The first number of the only leaf of each version that a process has."""
  return {version: float(leaf[0]) for version, (leaf,) in process.weights.items()}


def test_new_weights_arrive_while_older_ones_draw_and_stay_as_long_as_they_are_needed(hub):
  process, parts = Process(hub), []
  first = hub.weights({"a": jnp.full(2, 1.0)})
  drawing = threading.Thread(target=lambda params: parts.extend(call(hub, params)), args=(first,))
  drawing.start()
  asked = process.asked()
  assert asked.fields["version"] == first.version
  second, third = (hub.weights({"a": jnp.full(2, value)}) for value in (2.0, 3.0))
  process.take(process.next())
  process.take(process.next())
  assert values_of(process) == {first.version: 1, second.version: 2, third.version: 3}
  process.send(asked, [*range(P)])
  drawing.join()
  dropped = first.version
  del first
  fourth = hub.weights({"a": jnp.full(2, 4.0)})
  process.take(process.next())
  assert dropped not in process.weights  # nobody on the learner has them any more
  assert values_of(process) == {second.version: 2, third.version: 3, fourth.version: 4}
  process.serve()
  assert_whole([*call(hub, third)])
  assert process.drawn[0].fields["version"] == third.version


def test_a_process_that_joins_late_gets_what_its_part_needs_first(hub):
  old, new = (hub.weights({"a": jnp.full(2, value)}) for value in (1.0, 2.0))
  coming = threading.Thread(target=lambda: [*call(hub, new)])
  coming.start()
  while not hub._waiting:
    time.sleep(0.01)
  process = Process(hub)
  first = process.next()
  assert (first.kind, first.fields["version"]) == ("weights", new.version)
  process.take(first)
  asked = process.next()
  assert asked.kind == "draw"
  process.take(process.next())
  assert values_of(process) == {new.version: 2, old.version: 1}
  process.send(asked, [*range(P)])
  coming.join()


def test_a_process_that_takes_nothing_holds_up_no_step_and_gets_no_old_weights(hub):
  slow, large = Process(hub), np.zeros(2**23, np.float32)
  started = time.monotonic()
  made = [hub.weights({"a": jnp.asarray(large + value)}) for value in range(5)]
  last = made[-1].version
  del made  # nobody needs them, but for the newest
  assert time.monotonic() - started < 5
  Process(hub).serve()
  assert_whole([*call(hub)])
  seen = []
  while not seen or seen[-1] < last:
    slow.take(message := slow.next())
    seen.append(message.fields["version"])
  assert len(seen) <= 2  # one had begun


def test_leaves_lie_once_on_the_devices_or_on_the_host():
  shape = jax.ShapeDtypeStruct(
    (2,), jnp.bfloat16, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
  )
  kept = KeptVersions([shape, shape])
  array = np.ones(2, ml_dtypes.bfloat16)

  def take(version, leaves, keep, places=("0", "1")):
    sent = {place: array * version for place in places}
    fields = {"version": version, "leaves": leaves, "keep": keep}
    kept.check(fields, {name: (x.dtype, x.shape) for name, x in sent.items()})
    kept.take(fields, sent)

  def on_devices():
    return {number for number, leaf in kept._leaves.items() if isinstance(leaf, jax.Array)}

  take(1, [10, 11], [1])
  take(2, [10, 12], [1, 2], ["1"])
  assert on_devices() == set()
  first = kept.use(1)
  assert on_devices() == {10, 11} and first[0].dtype == jnp.bfloat16
  assert [float(leaf[0]) for leaf in kept.use(2)] == [1, 2]
  assert on_devices() == {10, 12} and {*kept._leaves} == {10, 11, 12}
  assert kept.use(2)[0] is first[0]
  assert [float(leaf[0]) for leaf in kept.use(1)] == [1, 1]
  take(3, [10, 13], [2, 3], ["1"])
  assert {*kept._leaves} == {10, 12, 13}
  with pytest.raises(BadMessage, match="weights that it has not sent: 1"):
    kept.use(1)
  with pytest.raises(BadMessage, match="left out leaf 1"):
    take(4, [10, 11], [4], ["0"])


def test_while_nobody_samples_it_says_so_and_a_close_ends_the_wait(hub, capfd, monkeypatch):
  monkeypatch.setattr(learner, "_TELL", 0.1)
  failed = []

  def wait():
    with pytest.raises(SamplingClosed):
      next(call(hub))
    failed.append(True)

  thread = threading.Thread(target=wait)
  thread.start()
  time.sleep(0.5)
  assert thread.is_alive()
  started = time.monotonic()
  hub.close()
  thread.join()
  assert failed and time.monotonic() - started < 2
  told = capfd.readouterr().err.splitlines()
  assert len(told) >= 2 and f"grpo_jax.sample_for --learner={hub.address}" in told[0]


def test_a_process_is_told_that_the_run_has_ended(hub):
  waits = Process(hub)
  hub.say_ended()
  hub.close()
  assert waits.next().kind == "ended"


def test_an_address_that_is_taken_is_an_error(hub):
  with pytest.raises(ConfigError, match="rollout.listen: nothing can listen at 127.0.0.1"):
    RemoteSampler(address_of(hub), TERMS, LIMITS)


def config_of(folder, **rollout):
  config = dataclasses.replace(small_config(old_logprobs="sampler"), steps=4)
  config = with_section(config, "rollout", **rollout)
  config = with_section(config, "checkpoint", every=2)
  return with_reward(config, folder, REWARD)


def sampling_of(**changes):
  return small_run(with_section(small_config(), "sampling", **changes))


@contextlib.contextmanager
def sampling_for(run, address, access=OPEN):
  """A sampler process, as a thread of this one."""
  thread = threading.Thread(target=sample_for, args=(run, address, 30, access))
  thread.start()
  yield
  thread.join()


def with_images(folder):
  return vision_config(folder, "trained")


def with_adapters(folder):
  config = with_section(small_config(), "model", path=make_checkpoint(folder / "hf"))
  return with_section(config, "lora", rank=4, base_dtype="int8")


def with_filters(folder):
  del folder

  @grpo_jax.register_filter
  def near(logits_BV, value_B1):
    return logits_BV >= logits_BV.max(-1, keepdims=True) - value_B1

  settings = dict(temperature=0.7, top_k=5, min_tokens=2, top_p=0.9, min_p=0.01)
  settings["filters"] = ("near=0.02",)
  return with_section(small_config(), "sampling", **settings)


def with_texts_that_end(folder):
  del folder
  settings = dict(dtype="bfloat16", weights_dtype="int8", stop=("1",))
  return with_section(small_config(), "sampling", **settings)


def with_experts(folder):
  return with_section(small_config(), "model", path=str(make_folder(folder / "hf")))


@pytest.mark.parametrize(
  "make, parts",
  [
    pytest.param(with_experts, 1, marks=pytest.mark.slow),
    pytest.param(with_filters, 2, marks=pytest.mark.slow),
    (with_texts_that_end, 1),
    pytest.param(with_adapters, 1, marks=pytest.mark.slow),
    pytest.param(with_images, 1, marks=pytest.mark.slow),
  ],
)
def test_a_process_draws_what_the_run_would(make, parts, tmp_path):
  run = small_run(make(tmp_path))
  params = run.parameters.for_sampling(run.initial_params())
  prompts = loader.prompt_batch(run.prompts("train"), np.arange(P), run.hosts)
  arguments = params, prompts, jax.random.key(5), run.config.sampling.temperature
  options = {"keeps_experts": make is with_experts}
  here = make_rollout(run, G, **options)(*arguments)
  with listening(terms=terms_of(run), limits=limits_of(run), parts=parts) as hub:
    with sampling_for(run, address_of(hub)):
      remote = functools.partial(RemoteGroups, hub)
      there = make_rollout(run, G, remote=remote, **options)(*arguments)
      hub.say_ended()
      hub.close()
  assert jax.tree.structure(there) == jax.tree.structure(here)
  for ours, theirs in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
    assert ours.dtype == theirs.dtype
    if parts == 1 or ours.dtype != np.float32:
      np.testing.assert_array_equal(ours, theirs)
    else:  # in two parts, sums are rounded otherwise
      np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
  FILTERS.pop("near", None)


def test_a_call_draws_only_groups_that_follow_one_another():
  """Groups 0 and 2 could be drawn together by their keys and rows, but group 1 is between them."""
  begun = []

  def begin(params, tokens_nS, *_, **__):
    begun.append(tokens_nS[:, 0].tolist())
    return types.SimpleNamespace(left=0, next=lambda seconds: None)

  groups = RemoteGroups(
    types.SimpleNamespace(begin=begin), lambda: (None, 0), G, keeps_experts=False
  )
  ours, others = (Prompts(np.arange(3)[:, None] + n, np.ones(3, int)) for n in (0, 10))
  key = np.asarray(jax.random.key_data(jax.random.key(1)))
  groups.submit([GroupRequest(n, (ours, others)[n % 2], n, key, n * G) for n in range(3)])
  while groups.draws:
    groups.advance()
  assert begun == [[0], [11], [2]]


@pytest.mark.slow
def test_a_frozen_base_is_sent_once(hub, tmp_path):
  run = small_run(with_adapters(tmp_path))
  trained = run.initial_params()
  first = hub.weights(run.parameters.for_sampling(trained))
  later = hub.weights(run.parameters.for_sampling(jax.tree.map(lambda x: x + 1, trained)))
  known = {leaf.number for leaf in first.leaves}
  new = [leaf for leaf in later.leaves if leaf.number not in known]
  assert 0 < len(new) < len(later.leaves)
  wanted = [(x.shape, x.dtype) for x in jax.tree.leaves(abstract_weights(run))]
  assert [(leaf.array.shape, leaf.array.dtype) for leaf in later.leaves] == wanted


def a_draw():
  """The fields and arrays of a message that asks for completions by weights 7."""
  key = np.asarray(jax.random.key_data(jax.random.key(1)))
  arrays = {"prompts_PS": np.ones((P, 12), np.int32), "prompt_lengths_P": np.full(P, 3), "key": key}
  fields = {"members": G, "first_prompt": 0, "settings": {}, "keeps_experts": False, "version": 7}
  fields |= {"pauses": False, "turn_tokens": 0}
  return fields, arrays


def test_a_process_stops_when_nobody_waits_for_what_it_draws():
  """The learner leaves at once after it has asked."""
  run = small_run(small_config())
  params = run.parameters.for_sampling(run.initial_params())
  weights = {str(place): np.asarray(x) for place, x in enumerate(jax.tree.leaves(params))}
  sent = {"version": 7, "leaves": [*range(len(weights))], "keep": [7]}
  drawer, is_gone = Drawer(run), threading.Event()
  drawer.weights.take(sent, weights)
  fields, arrays = a_draw()
  is_gone.set()
  with pytest.raises(ConnectionError, match="while a batch was drawn"):
    next(drawer.draw(Message("draw", fields, arrays), is_gone))

  with socket.create_server(("127.0.0.1", 0)) as server, sampling_for(run, server.getsockname()):
    accepted = accepted_at(server)
    assert accepted.receive(0).kind == "hello"
    accepted.send("welcome")
    accepted.send("weights", sent, weights)
    accepted.send("draw", fields, arrays)
    accepted.send("ended")  # it returns, and does not try again


DRAW = {
  "members": [0, -1, 1.5, True, None, 2**40],
  "first_prompt": [-1, 0.5, "0", 2**40],
  "keeps_experts": [0, None, "yes"],
  "pauses": [0, None, "yes"],
  "turn_tokens": [-1, None, 2.5],
  "settings": [[], None, {"temperature": "warm"}, {"temperature": -1}, {"temperature": 1e400},
               {"temperatur": 1}, {"top_k": True}, {"top_p": [1]}],
}  # fmt: skip
ARRAYS = {
  "prompts_PS": [
    np.ones((P, 12, 1), np.int32),
    np.ones((P, 12), np.float32),
    np.full((P, 12), -1, np.int32),
    np.full((P, 12), 10**6, np.int32),
    np.ones((0, 12), np.int32),
  ],
  "prompt_lengths_P": [np.full(P, 13), np.full(P, 0), np.full(P, -1), np.full(P + 1, 3)],
  "key": [np.zeros(3, np.uint32), np.zeros(2, np.float32), np.zeros((2, 2), np.uint32)],
  "other": [np.zeros(1)],
  "images.patches_PINC": [np.zeros((P, 1, 1), np.float32), np.zeros((P, 1, 1, 1), np.float32)],
}


def test_a_process_believes_no_learner_either():
  run = small_run(small_config())
  drawer, leaves = Drawer(run), jax.tree.leaves(abstract_weights(run))
  good = {str(place): np.zeros(x.shape, x.dtype) for place, x in enumerate(leaves)}
  sent = {"version": 7, "leaves": [*range(len(good))], "keep": []}
  fields, arrays = a_draw()

  def draw(fields=fields, arrays=arrays):
    next(drawer.draw(Message("draw", fields, arrays), threading.Event()))

  def take(arrays, **changes):
    drawer.weights.check(sent | changes, {n: (x.dtype, x.shape) for n, x in arrays.items()})
    drawer.weights.take(sent | changes, arrays)

  for version in (7, None, [], "7"):
    with pytest.raises(BadMessage, match="weights that it has not sent"):
      draw(fields | {"version": version})
  with pytest.raises(BadMessage, match="left out leaf 1 of its weights"):
    take({name: x for name, x in good.items() if name != "1"})
  for wrong in (good["0"][:-1], good["0"].astype(np.float16), good["0"][None]):
    with pytest.raises(BadMessage, match="it sent leaf 0 of its weights as"):
      take(good | {"0": wrong})
  for name in ("-1", "99", "a", "9" * 5000):
    with pytest.raises(BadMessage, match="a leaf of the weights called"):
      take({name: good["0"]})
  for leaves in ("all", None, [*range(len(good) - 1)], [0] * len(good), ["0"] * len(good)):
    with pytest.raises(BadMessage, match="weights of other leaves than"):
      take(good, leaves=leaves)
  for version in ("new", None, -1, True):
    with pytest.raises(BadMessage, match="it sent version"):
      take(good, version=version)
  for keep in (None, 7, ["7"]):
    with pytest.raises(BadMessage, match="did not say which versions stay"):
      take(good, keep=keep)
  take(good)
  for name, values in DRAW.items():
    for value in values:
      with pytest.raises(BadMessage, match=f"it sent {name}"):
        draw(fields | {name: value})
  for name, values in ARRAYS.items():
    for value in values:
      with pytest.raises(BadMessage, match="it (sent|left out)"):
        draw(arrays=arrays | {name: value})
  for name in arrays:
    with pytest.raises(BadMessage, match=name):
      draw(arrays={other: x for other, x in arrays.items() if other != name})


def test_a_process_that_is_sent_away_ends_and_says_why(capfd):
  run = small_run(small_config())
  with socket.create_server(("127.0.0.1", 0)) as server:

    def refuse():
      accepted = accepted_at(server)
      accepted.receive(0)
      accepted.send("welcome")
      accepted.send("refused", {"why": "it sent tokens_PGT\nwith -1"})
      with contextlib.suppress(OSError):
        accepted.receive(0)

    threading.Thread(target=refuse, daemon=True).start()
    with pytest.raises(RunFailed, match="sent this sampler away: it sent tokens_PGT with -1"):
      sample_for(run, server.getsockname(), 30)


def test_a_process_ends_if_its_learner_keeps_sending_what_cannot_be_drawn(monkeypatch):
  monkeypatch.setattr(sampler, "_PAUSE", 0.01)
  run = small_run(small_config())
  with socket.create_server(("127.0.0.1", 0)) as server:

    def send_nonsense():
      for _ in range(5):
        accepted = accepted_at(server)
        accepted.receive(0)
        accepted.send("welcome")
        accepted.send("weights", {"version": 0, "leaves": -1})
        with contextlib.suppress(OSError, BadMessage):
          accepted.receive(0)

    threading.Thread(target=send_nonsense, daemon=True).start()
    with pytest.raises(
      RunFailed, match="sends what cannot be drawn: it sent weights of other leaves"
    ):
      sample_for(run, server.getsockname(), 600)


def test_another_config_is_refused_on_both_sides(capfd):
  run, other = sampling_of(), sampling_of(top_p=0.5)
  with listening(terms=terms_of(run)) as hub:
    with pytest.raises(ConfigError, match="config key sampling.top_p is 0.5, and the learner has"):
      sample_for(other, address_of(hub), 30)
  assert "sent away: config key sampling.top_p is 0.5" in capfd.readouterr().err


@pytest.mark.parametrize(
  "section, changes, is_same",
  [
    ("mesh", dict(data=1, tensor=1), True),
    ("sampling", dict(rows=2), True),
    ("checkpoint", dict(every=7), True),
    ("model", dict(embed_dim=32), False),
    ("data", dict(task="letters"), False),
  ],
)
def test_terms_are_what_completions_depend_on(section, changes, is_same):
  if section == "data":
    changes = dict(prompt="Question: {question}?!")
  ours = terms_of(small_run(small_config()))
  theirs = terms_of(small_run(with_section(small_config(), section, **changes)))
  assert (not difference(ours, json.loads(json.dumps(theirs)))) == is_same


def test_a_process_gives_up_when_no_learner_is_there():
  run = sampling_of()
  with pytest.raises(RunFailed, match="no learner was at 127.0.0.1:.* for 0.5 seconds"):
    sample_for(run, ("127.0.0.1", free_port()), 0.5)


@pytest.fixture
def one_device(monkeypatch):
  """Two threads that run programs of several devices of a CPU at once may wait for each other."""
  first = jax.devices()[:1]
  monkeypatch.setattr(jax, "devices", lambda: first)


def trained(config, folder):
  return jax.device_get(run_steps(config, folder).state.train.params)


def answer_without_sense(run, port):
  """A process that joins a run, draws ids that no vocabulary has, and is sent away."""
  until = time.monotonic() + 60
  while True:
    try:
      connection = Connection(handshake.join(("127.0.0.1", port), OPEN))
      break
    except ConnectionRefusedError:  # it does not listen yet
      assert time.monotonic() < until
      time.sleep(0.05)
  connection.send("hello", {"terms": terms_of(run)})
  while (message := connection.receive(2**30)).kind != "draw":
    assert message.kind in ("welcome", "weights", "alive")
    if message.kind == "alive":
      connection.send("alive")
  count, members = len(message.arrays["prompts_PS"]), message.fields["members"]
  row = (count, members, run.config.sampling.max_tokens)
  completions = {
    "tokens_PGT": np.full(row, 10**6, np.int32),
    "lengths_PG": np.full(row[:2], row[2], np.int32),
    "sampled_PGT": np.ones(row, bool),
    "logprobs_PGT": np.zeros(row, np.float32),
    "behavior_logprobs_PGT": np.zeros(row, np.float32),
    "stopped_by_PG": np.full(row[:2], -1, np.int32),
  }
  connection.send("finished", {"prompts": [*range(count)]}, completions)
  while (message := connection.receive(2**30)).kind in ("alive", "weights"):
    pass
  assert message.kind == "refused"
  connection.close()


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_run_whose_batches_a_process_draws_has_the_same_numbers(tmp_path, staleness, capfd):
  """Even if another process was there first, whose answers make no sense."""
  here = trained(config_of(tmp_path, max_staleness=staleness), tmp_path / "here")
  port = free_port()
  config = config_of(tmp_path, max_staleness=staleness, listen=f"127.0.0.1:{port}")
  run = small_run(config)

  def sample():
    answer_without_sense(run, port)
    sample_for(run, ("127.0.0.1", port), 30)

  thread = threading.Thread(target=sample)
  thread.start()
  there = trained(config, tmp_path / "there")
  thread.join()
  jax.tree.map(np.testing.assert_array_equal, here, there)
  assert "was sent away: it sent tokens_PGT with 1000000" in capfd.readouterr().err
  assert numbers_of(tmp_path / "there") == numbers_of(tmp_path / "here")


def numbers_of(workdir):
  """The rows of metrics without what depends on time."""
  timed = ("time/", "perf/", "rollout/")
  rows = read_metrics(workdir)
  return [{name: x for name, x in row.items() if not name.startswith(timed)} for row in rows]


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("staleness", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_run_that_waits_for_a_sampler_can_be_stopped(tmp_path, staleness, monkeypatch):
  config = config_of(tmp_path, max_staleness=staleness, listen=f"127.0.0.1:{free_port()}")
  requests, said = [], []

  @contextlib.contextmanager
  def keeping(request):
    requests.append(request)
    yield

  def say(line):
    said.append(line)
    requests[0].ask("a test")

  monkeypatch.setattr(learner, "_say", say)
  with pytest.raises(Stopped):
    run_steps(config, tmp_path / "run", signals=keeping)
  assert "waiting for a sampler" in said[0] and "no sampler is there" in said[1]


@pytest.mark.parametrize(
  "changes, why",
  [
    ({"rollout": dict(listen="5555")}, "it must be HOST:PORT"),
    ({"rollout": dict(listen="localhost:70000")}, "it must be HOST:PORT"),
    ({"mesh": dict(sampler=1)}, "mesh.sampler"),
    ({"environment": dict(harness="x.py:play")}, "the endpoint of a harness"),
    ({"rollout": dict(weights="in_flight", max_staleness=1)}, "'fixed' or 'newest'"),
    ({"rollout": dict(samplers=3)}, "it must divide batch.prompts"),
    ({"rollout": dict(samplers=2, listen="")}, "be 1 without rollout.listen"),
    ({"rollout": dict(weights="newest")}, "it needs mesh.sampler above 0, rollout.listen or"),
  ],
)
def test_what_processes_cannot_sample_is_refused(changes, why):
  config = small_config(old_logprobs="sampler")
  config = with_section(config, "rollout", listen="127.0.0.1:5555")
  for section, values in changes.items():
    config = with_section(config, section, **values)
  with pytest.raises(ConfigError, match=why):
    small_run(config)


ROOT = Path(__file__).parents[1]
STEPS, KILLS = 120, 10
KEYS = f"""
  steps={STEPS} model.embed_dim=16 model.num_layers=1 model.num_heads=2 model.num_kv_heads=2
  model.head_dim=8 model.mlp_dim=32 batch.prompts=4 batch.group_size=3 sampling.max_tokens=5
  optimizer.learning_rate=1e-2 optimizer.schedule=constant warm_start.steps=0 eval.every=0
  checkpoint.every=2 log.tensorboard=False log.completions_every=0 reward.workers=0
  algo.old_logprobs=sampler rollout.max_staleness=2
""".split()


def start(name, folder, *flags):
  """Starts a command on one device. What it prints is added to FOLDER/NAME.txt."""
  keys = [f"--config.{key}" for key in (*KEYS, f"reward.functions=('{folder}/reward.py:reward',)")]
  command = [sys.executable, "-m", f"grpo_jax.{name}", "--config=configs/arithmetic.py"]
  with open(folder / f"{name}.txt", "a") as out:
    return subprocess.Popen(
      [*command, *keys, *flags],
      cwd=ROOT,
      env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"},
      stdout=out,
      stderr=subprocess.STDOUT,
    )


def params_of(workdir):
  return jax.device_get(policy_of_run(workdir, STEPS).params)


def troubled(folder, trouble, *flags):
  """Ends a run that samples itself, and one beside a sampler process that gets into trouble.

  Args:
    folder: Of both runs: alone, run.
    trouble: What befalls them each time. It gets the commands' processes by name.
    flags: Of both runs.
  """
  (folder / "reward.py").write_text("import time\n" + REWARD + "\n")
  assert start("train", folder, f"--workdir={folder / 'alone'}", *flags).wait() == 0
  slow = REWARD.replace("  return", "  time.sleep(0.3)\n  return")
  (folder / "reward.py").write_text("import time\n" + slow)
  address, random = f"127.0.0.1:{free_port()}", Random(0)
  commands = {
    "train": (f"--workdir={folder / 'run'}", f"--config.rollout.listen={address}", *flags),
    "sample_for": (f"--learner={address}", *flags),
  }
  processes = {name: start(name, folder, *command) for name, command in commands.items()}
  started, befell = time.monotonic(), []
  try:
    for _ in range(KILLS):
      if random.random() < 0.7:  # otherwise perhaps before it is ready
        wait_for_more_rows(folder)
      time.sleep(random.uniform(0, 6))
      assert processes["train"].poll() is None, "the run has ended before: give it more steps"
      name = trouble(processes, random)
      if processes[name].poll() is not None:
        processes[name] = start(name, folder, *commands[name])
      befell.append((name, round(time.monotonic() - started, 1), len(rows_so_far(folder))))
    codes = {name: process.wait(timeout=300) for name, process in processes.items()}
  finally:
    for process in processes.values():
      process.kill()
  print(f"trouble (of what, after so many seconds, rows then): {befell}")
  assert codes == {"train": 0, "sample_for": 0}


def killed(processes, random):
  name = random.choice(sorted(processes))
  processes[name].kill()
  processes[name].wait()
  return name


def stopped_for_a_while(processes, random):
  processes["sample_for"].send_signal(signal.SIGSTOP)
  time.sleep(random.uniform(1, 8))
  processes["sample_for"].send_signal(signal.SIGCONT)
  return "sample_for"


@pytest.mark.slow
@pytest.mark.parametrize("trouble", [killed, stopped_for_a_while])
def test_learner_and_sampler_may_get_into_trouble_at_any_moment(trouble, tmp_path):
  """Ten SIGKILLs, or SIGSTOPs: the run ends with the numbers of one that samples itself."""
  troubled(tmp_path, trouble)
  rows = numbers_of(tmp_path / "run")
  assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
  assert rows == numbers_of(tmp_path / "alone")
  jax.tree.map(
    np.testing.assert_array_equal, params_of(tmp_path / "run"), params_of(tmp_path / "alone")
  )


@pytest.mark.slow
def test_learner_and_sampler_may_be_killed_while_an_environment_answers(tmp_path):
  """Ten SIGKILLs. Tokens are the same. Numbers are, but for rounding: rows pause at other times."""
  (tmp_path / "game.py").write_text(GAME)
  keys = f"""
    environment.name={tmp_path}/game.py:Game environment.max_turns=3 environment.turn_tokens=3
    sampling.max_tokens=12 data.max_prompt_tokens=12 optimizer.learning_rate=1e-4
    log.completions_every=10
  """.split()
  troubled(tmp_path, killed, *(f"--config.{key}" for key in keys))
  for step in range(10, STEPS + 1, 10):
    ours, theirs = (read_completions(tmp_path / name, step) for name in ("run", "alone"))
    assert [row["turns"] for row in ours] == [row["turns"] for row in theirs]
    assert [row["completion_ids"] for row in ours] == [row["completion_ids"] for row in theirs]
    assert any(len(row["turns"]) > 1 for row in ours)
  ours, theirs = map(jax.tree.leaves, (params_of(tmp_path / "run"), params_of(tmp_path / "alone")))
  for own, other in zip(ours, theirs, strict=True):
    np.testing.assert_allclose(own, other, atol=1e-4)


def rows_so_far(folder):
  file = folder / "run/metrics.jsonl"
  return file.read_bytes().splitlines() if file.exists() else []


def wait_for_more_rows(folder):
  before, until = len(rows_so_far(folder)), time.monotonic() + 120
  while len(rows_so_far(folder)) <= before:
    assert time.monotonic() < until, "the run does not go on"
    time.sleep(0.1)


GAME = """
class Game:
  def __init__(self):
    self.turns = 0

  def reset(self, example):
    return []

  def step(self, message):
    self.turns += 1
    return "=1", float(len(message["content"])), self.turns >= 2
"""


def with_a_game(folder):
  (folder / "game.py").write_text(GAME)
  config = with_section(small_config(), "sampling", max_tokens=12)
  config = with_section(config, "data", max_prompt_tokens=12)
  name = f"{folder}/game.py:Game"
  return with_section(config, "environment", name=name, max_turns=3, turn_tokens=3)


@pytest.mark.parametrize("parts", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_environment_answers_rows_of_processes(parts, tmp_path):
  """Also those of a process that comes after one that was there for a while."""
  run = small_run(with_a_game(tmp_path))
  talkers = Scorers(run).talkers
  params = run.parameters.for_sampling(run.initial_params())
  prompts = loader.prompt_batch(run.prompts("train"), np.arange(P), run.hosts)
  arguments = params, prompts, jax.random.key(5), 1.0
  here = make_rollout(run, G, talkers=talkers)(*arguments)
  assert (~here.completions.sampled_PGT & (here.completions.tokens_PGT > 0)).any()
  with listening(terms=terms_of(run), limits=limits_of(run), parts=parts) as hub:
    with sampling_for(run, address_of(hub)):
      remote = functools.partial(RemoteGroups, hub)
      there = make_rollout(run, G, talkers=talkers, remote=remote)(*arguments)
      hub.say_ended()
      hub.close()
  for name in ("tokens_PGT", "sampled_PGT", "lengths_PG", "stopped_by_PG"):
    ours, theirs = getattr(here.completions, name), getattr(there.completions, name)
    np.testing.assert_array_equal(ours, theirs)
  np.testing.assert_allclose(
    here.completions.logprobs_PGT, there.completions.logprobs_PGT, atol=1e-5
  )
  assert (here.turns_PG == there.turns_PG).all() and (here.texts_PG == there.texts_PG).all()


def test_a_row_that_another_process_draws_again_goes_on_with_the_replies_that_it_had():
  part = DrawnPart([4], None, {}, {}, None, deque(), {0})
  row = 0, 1
  assert part.paused(row, 3)
  assert part.answers == []
  part.reply(row, [7, 8])
  assert part.answers == [[0, 1, [7, 8]]]
  assert part.paused(row, 9)  # a second turn, which nobody has answered when the process dies
  part.begin_again()
  assert not part.paused(row, 3) and part.answers == [[0, 1, [7, 8]]]
  assert not part.paused(row, 9)  # it was asked for already
  part.reply(row, None)
  assert part.answers == [[0, 1, [7, 8]], [0, 1, None]]
  part.begin_again()
  assert part.answers == []
  with pytest.raises(BadMessage, match="other tokens than the process before"):
    part.paused(row, 4)


def test_a_reply_that_comes_late_is_sent_once_the_new_process_has_paused():
  part = DrawnPart([4], None, {}, {}, None, deque(), {0})
  assert part.paused((0, 0), 2)
  part.begin_again()  # it died before the reply came
  part.reply((0, 0), [5])
  assert part.answers == []
  assert not part.paused((0, 0), 2) and part.answers == [[0, 0, [5]]]


@pytest.mark.parametrize(
  "rows, why",
  [
    ([], "none may"),
    ([[0, 0, 1]], "not as it must"),
    ([[0, 0, 1, "1"]], "not as it must"),
    ([[0, 0, 1, -1]] * 9, "not as it must"),
    ([[2, 0, 1, -1]], "did not get them"),
    ([[0, 2, 1, -1]], "did not get them"),
    ([[0, 0, 0, -1]], "did not get them"),
    ([[0, 0, 5, -1]], "did not get them"),
    ([[0, 0, 2, 9]], "after another token"),
  ],
)
def test_rows_that_cannot_pause_are_no_message(rows, why):
  part, limits = (
    contents.PartRequest(2, 6, 2, 4, False, True),
    CompletionLimits(vocabulary=8, tokens=4),
  )
  fields, arrays = {"rows": rows}, {"tokens_RT": np.ones((len(rows), 4), np.int32)}
  shapes = {"tokens_RT": (arrays["tokens_RT"].dtype, arrays["tokens_RT"].shape)}
  with pytest.raises(BadMessage, match=why):
    contents.check_paused(fields, shapes, part, limits)
    contents.paused(fields, arrays, part, limits)


def test_a_process_cannot_ask_for_replies_that_no_row_needs():
  part = DrawnPart([4, 5], None, {}, {}, None, deque(), {0})
  part.paused((0, 0), 2)
  with pytest.raises(BadMessage, match="had paused or ended before"):
    part.paused((0, 0), 2)
  part.reply((0, 0), None)
  with pytest.raises(BadMessage, match="had paused or ended before"):
    part.paused((0, 0), 3)
  with pytest.raises(BadMessage, match="after its group had ended"):
    part.paused((1, 0), 2)


def test_a_row_is_not_believed_that_ends_before_it_is_told_to():
  part, limits = (
    contents.PartRequest(1, 6, 1, 4, False, True),
    CompletionLimits(vocabulary=8, tokens=4),
  )
  ones, is_token = np.ones((1, 1), np.int32), np.arange(4) < 1
  arrays = {
    "tokens_PGT": np.where(is_token, 3, 0)[None, None].astype(np.int32),
    "lengths_PG": ones,
    "sampled_PGT": is_token[None, None],
    "logprobs_PGT": np.zeros((1, 1, 4), np.float32),
    "behavior_logprobs_PGT": np.zeros((1, 1, 4), np.float32),
    "stopped_by_PG": 3 * ones,
  }
  assert contents.completions(arrays, part, limits, [[[(1, None)]]]).lengths_PG == 1
  for replies in ([[[]]], [[[(1, [5])]]]):
    with pytest.raises(BadMessage, match="not told to end"):
      contents.completions(arrays, part, limits, replies)
