"""An engine of others draws: what it is asked, what is believed, and what is said if it fails."""

import contextlib
import dataclasses
import json
import queue
import threading
import time

from engine_server import LENGTH, FakeVllm, Refusal, serving
import jax
from lora_run_test import make_checkpoint
import numpy as np
import pytest
from small_run import G, P, T, small_config, small_run, with_reward, with_section

from grpo_jax.config import Config
from grpo_jax.engine import command, keep
from grpo_jax.engine.client import Client, Gone, Refused
from grpo_jax.engine.connect import Engine, check_facts
from grpo_jax.engine.drawn import DrawnFile, Recorded, Turn
from grpo_jax.engine.proof import what_is_wrong
from grpo_jax.engine.vllm import Ask, Facts, VllmServer
from grpo_jax.run.checks import check_config, corrected
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
