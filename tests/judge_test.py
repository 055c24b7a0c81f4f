"""The judge, against a server of this test that speaks OpenAI's chat completions."""

import asyncio
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import json
import re
import socket
import subprocess
import sys
import threading
import time

import pytest

from grpo_jax import rewards
from grpo_jax.rewards.answer import RewardError
from grpo_jax.rewards.call import call
from grpo_jax.rewards.functions import judge as judge_module
from grpo_jax.settings import ConfigError


class Server:
  """Counts requests, and answers each with what `answer(prompt, number)` returns or does."""

  def __init__(self, answer):
    self.requests, self.headers, self.most_at_once, self._now = [], [], 0, 0
    self.answer, lock, server = answer, threading.Lock(), self

    class Handler(BaseHTTPRequestHandler):
      def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with lock:
          server.requests.append(body)
          server.headers.append(self.headers)
          number = len(server.requests)
          server._now += 1
          server.most_at_once = max(server.most_at_once, server._now)
        try:
          server.reply(self, server.answer(body["messages"][0]["content"], number))
        finally:
          with lock:
            server._now -= 1

      def log_message(self, *args):
        pass

    class Quiet(ThreadingHTTPServer):
      daemon_threads = True
      request_queue_size = 128  # the default of 5 refuses some of many requests at once

      def handle_error(self, *args):  # a client that gave up
        pass

    self.http = Quiet(("127.0.0.1", 0), Handler)
    self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
    threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

  def reply(self, handler, answer):
    status, headers, text = answer if isinstance(answer, tuple) else (200, {}, answer)
    if status == 200 and isinstance(text, str):
      text = json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})
    text = text if isinstance(text, bytes) else text.encode()
    assert handler.path == "/v1/chat/completions"
    handler.send_response(status)
    for name, value in ({"Content-Type": "application/json"} | headers).items():
      handler.send_header(name, value)
    handler.end_headers()
    if headers.get("X-Slowly"):
      for byte in text:
        handler.wfile.write(bytes([byte]))
        time.sleep(0.05)
    handler.wfile.write(text)


@pytest.fixture
def serve():
  servers = []

  def start(answer):
    servers.append(Server(answer))
    return servers[-1]

  yield start
  for server in servers:
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture(autouse=True)
def no_memory_of_earlier_replies(monkeypatch):
  monkeypatch.setattr(judge_module, "_replies", {})


def answer_of(url, completions, parameters="", **columns):
  """What the judge says of completions, called as a run without workers calls it."""
  name = f"judge(url='{url}', model='m'{parameters})"
  function = rewards.resolve(name, "reward.functions", lambda name: False)
  columns = {"question": ["?"] * len(completions), "answer": ["1"] * len(completions)} | columns
  return call(function, "judge", {"completions": completions} | columns)


def judge(url, completions, parameters="", **columns):
  """The scores."""
  steps = answer_of(url, completions, parameters, **columns).steps
  return [one[0][1] if one else None for one in steps]


def reason(url, completions, parameters="", **columns):
  """Why no completion has a score. It is the same for all of them."""
  answer = answer_of(url, completions, parameters, **columns)
  assert answer.steps == [[]] * len(completions)
  assert [one.kind for one in answer.failures] == ["missing"] * len(completions)
  (text,) = {one.text for one in answer.failures}
  return text


def test_the_score_is_the_number_in_the_reply(serve):
  server = serve(
    lambda prompt, number: "Well. Score: 0\nNo: **Score: 1**" if "yes" in prompt else "Score: 0"
  )
  assert judge(server.url, ["yes", "no"]) == [1.0, 0.0]
  body = next(body for body in server.requests if "yes" in body["messages"][0]["content"])
  assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 0, 512)
  assert "Question:\n?\n" in body["messages"][0]["content"]


def test_scores_are_clipped(serve):
  server = serve(lambda prompt, number: "Score: 7")
  assert judge(server.url, ["a"]) == [1.0]
  assert judge(server.url, ["a"], ", highest=10, pattern=r'Score: (\\d+)'") == [7.0]


def test_a_prompt_of_the_user_is_filled_in_once(serve, tmp_path):
  (tmp_path / "prompt.txt").write_text("Rate {completion} for {topic}. {completion}")
  server = serve(lambda prompt, number: "Score: 1")
  judge(server.url, ["{topic}"], f", prompt_file='{tmp_path}/prompt.txt'", topic=["x {completion}"])
  sent = server.requests[0]["messages"][0]["content"]
  assert sent == "Rate {topic} for x {completion}. {topic}"
  with pytest.raises(RewardError, match="the prompt has {topic}, and the data set no such column"):
    judge(server.url, ["a"], f", prompt_file='{tmp_path}/prompt.txt'")
  (tmp_path / "prompt.txt").write_text("Rate it")
  with pytest.raises(ConfigError, match="it must hold {completion}"):
    judge(server.url, ["a"], f", prompt_file='{tmp_path}/prompt.txt'")


def test_a_row_without_a_field_of_the_prompt_is_not_judged(serve):
  server = serve(lambda prompt, number: "Score: 1")
  assert judge(server.url, ["a", "b"], answer=[None, "2"]) == [None, 1.0]
  assert len(server.requests) == 1


def test_the_same_prompt_is_asked_once(serve, tmp_path, monkeypatch):
  server = serve(lambda prompt, number: "Score: 1")
  cache = f", cache='{tmp_path}/replies'"
  assert judge(server.url, ["a", "a", "b"], cache) == [1.0] * 3
  assert len(server.requests) == 2
  assert judge(server.url, ["b", "a", "c"], cache) == [1.0] * 3
  assert len(server.requests) == 3
  monkeypatch.setattr(judge_module, "_replies", {})  # as in another process
  assert judge(server.url, ["a", "b", "c"], cache) == [1.0] * 3
  assert len(server.requests) == 3
  assert judge(server.url, ["a"], cache + ", max_tokens=7") == [1.0]  # another request
  assert len(server.requests) == 4


def test_requests_go_out_at_once(serve):
  def slow(prompt, number):
    time.sleep(0.2)
    return "Score: 1"

  server = serve(slow)
  texts = [str(i) for i in range(16)]
  start = time.monotonic()
  assert judge(server.url, texts, ", at_once=8") == [1.0] * 16
  assert time.monotonic() - start < 16 * 0.2  # what they take one after the other
  assert 2 <= server.most_at_once <= 8


def test_a_failure_is_tried_again(serve):
  answers = {
    1: (503, {"Retry-After": "0.1"}, "busy"),
    2: (429, {"Retry-After": "0.1"}, "slow down"),
  }
  server = serve(lambda prompt, number: answers.get(number, "Score: 1"))
  start = time.monotonic()
  assert judge(server.url, ["a"]) == [1.0]
  assert len(server.requests) == 3
  assert 0.2 <= time.monotonic() - start < 1  # as long as the server says
  server = serve(lambda prompt, number: (503, {"Retry-After": "0.05"}, "busy"))
  said = reason(server.url, ["a"], ", attempts=2")
  words = "gave no score: status 503 busy, tried 2 times"
  assert said == f"reward function judge: the judge at {server.url} {words}"
  assert len(server.requests) == 2


def test_a_request_that_is_wrong_is_not_tried_again(serve):
  server = serve(lambda prompt, number: (401, {}, "no key"))
  assert "status 401 no key" in reason(server.url, ["a"])
  assert len(server.requests) == 1


def test_a_row_that_fails_is_none_and_the_others_have_scores(serve):
  server = serve(lambda prompt, number: "I cannot say" if "bad" in prompt else "Score: 1")
  answer = answer_of(server.url, ["ok", "bad", "fine"])
  assert answer.steps == [[(2, 1.0)], [], [(4, 1.0)]]
  assert answer.metrics == [("judge/failed", 1)]


def bad_group(prompt, number):
  """What a server answers that sends no JSON for the completions of one prompt."""
  return (200, {}, b'{"choices": [') if "bad" in prompt else "Score: 1"


def judged_in_workers(server, groups, parameters="", workers=2):
  """The answers for groups of completions, as a run with workers gets them."""
  source = f"judge(url='{server.url}', model='m'{parameters})"
  function = rewards.resolve(source, "reward.functions", lambda name: False)
  pool = rewards.Pool(workers, 30.0)
  caller = rewards.Caller(pool)
  assert caller.add({source: function}) == ()
  texts = [text for group in groups for text in group]
  columns = {"completions": texts, "question": ["?"] * len(texts), "answer": ["1"] * len(texts)}
  start = time.monotonic()
  answer = caller.start([function], columns, 1, len(groups[0]))[0].result()
  seconds = time.monotonic() - start
  pool.close()
  return answer, seconds


@pytest.mark.slow
def test_a_group_that_fails_costs_no_other_group_its_scores(serve):
  server = serve(bad_group)
  groups = [[f"bad {i}" if p == 3 else f"{p} {i}" for i in range(4)] for p in range(8)]
  answer, _ = judged_in_workers(server, groups, ", attempts=1")
  scored = [bool(steps) for steps in answer.steps]
  assert scored == [p != 3 for p in range(8) for _ in range(4)], answer.failures
  assert {one.kind for one in answer.failures} == {"missing"}
  assert "gave no score: it sent no chat completion: JSONDecodeError" in answer.failures[0].text
  assert len(server.requests) == 32  # no group was asked again


@pytest.mark.slow
def test_at_once_bounds_the_requests_of_all_workers_and_no_call_loses_time_to_others(serve):
  def slow(prompt, number):
    time.sleep(0.3)
    return "Score: 1"

  server = serve(slow)
  groups = [[f"{p} {i}" for i in range(4)] for p in range(16)]
  answer, seconds = judged_in_workers(server, groups, ", at_once=6, seconds=3.0")
  assert answer.steps == [[(len(text), 1.0)] for group in groups for text in group]
  assert server.most_at_once == 6
  # 64 requests of 0.3 s, 6 at a time, take more than the limit of one call. It has ten times the
  # time that its own requests need, so that a busy machine does not end it.
  assert seconds > 3.0


@pytest.mark.parametrize(
  "reply",
  [b"", b"[]", b'{"choices": []}', b'{"choices": [{"message": {"content": null}}]}', b"\xff"],
)
@pytest.mark.parametrize("kind", ["application/json", "text/html"])
def test_a_reply_that_is_none_is_an_error(serve, reply, kind):
  server = serve(lambda prompt, number: (200, {"Content-Type": kind}, reply))
  assert "gave no score" in reason(server.url, ["a"], ", attempts=1")


def test_a_reply_that_is_none_is_tried_again(serve):
  replies = {1: (200, {}, b'{"choices": ['), 2: (200, {}, b'{"choices": []}')}
  server = serve(lambda prompt, number: replies.get(number, "Score: 1"))
  assert "tried 1 times" in reason(server.url, ["a"], ", attempts=1")
  assert judge(server.url, ["a"], ", attempts=2") == [1.0]
  assert len(server.requests) == 3


def test_a_judge_that_is_down_is_an_error_and_not_a_hang(monkeypatch):
  monkeypatch.setattr(judge_module.random, "uniform", lambda low, high: 1.0)
  with socket.create_server(("127.0.0.1", 0)) as free:
    url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
  start = time.monotonic()
  # It asks at 0 and at 1 second. The next time would be at 3 seconds, which is too late.
  said = reason(url, ["a"], ", seconds=3, attempts=9")
  assert re.search("gave no score: ConnectionRefused.*, tried 2 times", said)
  assert time.monotonic() - start < 3


@pytest.mark.slow
def test_no_request_spends_its_time_limit_on_imports():
  code = (
    "import sys\n"
    "from grpo_jax.rewards.functions.judge import judge\n"
    "judge.prepare()\n"
    "print('openai.resources.chat.completions.completions' in sys.modules)"
  )
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert done.stdout.strip() == "True"


@pytest.mark.parametrize("headers", [{}, {"X-Slowly": "1"}])
def test_a_judge_that_never_ends_its_reply_is_given_up(serve, headers):
  def hang(prompt, number):
    if not headers:
      time.sleep(5)
    return 200, headers, " " * 1000

  server = serve(hang)
  start = time.monotonic()
  said = reason(server.url, ["a", "b"], ", seconds=0.6")
  assert re.search("gave no score: (no reply in time|timed out|.*time)", said)
  assert time.monotonic() - start < 3


def test_a_server_that_accepts_and_says_nothing_is_given_up():
  with socket.create_server(("127.0.0.1", 0)) as silent:
    url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
    start = time.monotonic()
    assert "gave no score" in reason(url, ["a"], ", seconds=0.5")
    assert time.monotonic() - start < 3


def test_the_key_is_sent_and_never_shown(serve, monkeypatch):
  monkeypatch.setenv("MY_KEY", "sesame")
  server = serve(lambda prompt, number: (401, {}, "no"))
  said = reason(server.url, ["a"], ", key_variable='MY_KEY'")
  assert server.headers[0]["Authorization"] == "Bearer sesame"
  assert "sesame" not in said


def test_nothing_of_the_environment_reaches_the_judge_but_the_key_that_the_config_names(
  serve, monkeypatch, capfd
):
  monkeypatch.setenv("OPENAI_API_KEY", "sesame")
  monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
  monkeypatch.setenv("OPENAI_ORG_ID", "organization")
  monkeypatch.setenv("OPENAI_PROJECT_ID", "project")
  monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Mine: custom\nAuthorization: Bearer custom")
  server = serve(lambda prompt, number: "Score: 1")
  assert judge(server.url, ["a"], ", key_variable='NO_SUCH_KEY'") == [1.0]
  headers = str(server.headers[0]).lower()
  assert server.headers[0]["Authorization"] == "Bearer none"
  assert not any(word in headers for word in ("sesame", "organization", "project", "custom"))
  assert capfd.readouterr() == ("", "")


def test_it_works_where_an_event_loop_runs_as_in_a_notebook(serve):
  server = serve(lambda prompt, number: "Score: 1")

  async def cell():
    return judge(server.url, ["a", "b"])

  assert asyncio.run(cell()) == [1.0, 1.0]


def test_half_a_character_is_sent_as_a_question_mark(serve):
  server = serve(lambda prompt, number: "Score: 1")
  assert judge(server.url, ["a\ud800b"]) == [1.0]
  assert "a?b" in server.requests[0]["messages"][0]["content"]


def test_a_missing_package_is_said_before_the_run(monkeypatch):
  monkeypatch.setitem(sys.modules, "openai", None)
  with pytest.raises(
    ConfigError, match=r"^reward judge needs .*openai: pip install -e '.\[judge\]'$"
  ):
    judge("http://127.0.0.1:9/v1", [])


def test_an_empty_batch_asks_nothing():
  assert judge("http://127.0.0.1:9/v1", []) == []
