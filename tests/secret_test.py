"""A connection proves that it knows the secret, nothing arrives damaged, and TLS hides the rest."""

import contextlib
import dataclasses
import os
import shutil
import socket
import subprocess
import threading
import time

import jax
import numpy as np
import pytest
from remote_test import (
  LIMITS,
  TERMS,
  Process,
  address_of,
  arriving,
  assert_whole,
  call,
  config_of,
  free_port,
  listening,
  one_device,  # noqa: F401  a fixture
  pair,
  sampling_for,
  trained,
)
from small_run import P, small_config, small_run, with_section

from grpo_jax.asynchronous import access, handshake
from grpo_jax.asynchronous.access import OPEN, Access
from grpo_jax.asynchronous.contents import limits_of
from grpo_jax.asynchronous.encryption import Encrypted
from grpo_jax.asynchronous.handshake import names
from grpo_jax.asynchronous.learner import RemoteSampler
from grpo_jax.asynchronous.messages import BadMessage, Connection, DamagedMessage
from grpo_jax.asynchronous.sampler import sample_for
from grpo_jax.asynchronous.terms import terms_of
from grpo_jax.config import Rollout
from grpo_jax.recipes import with_absolute_paths
from grpo_jax.sampler.sampling import Draws, whole
from grpo_jax.settings import ConfigError

SECRET = Access(b"a long random secret")
OTHER = Access(b"another secret")
NONCE = 32
MAGIC = b"grpojax2"


@contextlib.contextmanager
def accepting(allowed, count=1):
  """A learner's side that accepts so many peers. Yields its address and what became of them."""
  outcomes = []

  def accept():
    for _ in range(count):
      connected, _ = server.accept()
      try:
        outcomes.append(handshake.accept(connected, allowed))
      except (BadMessage, OSError) as error:
        outcomes.append(error)
        connected.close()

  with socket.create_server(("127.0.0.1", 0)) as server:
    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield server.getsockname(), outcomes
    thread.join(20)
    assert len(outcomes) == count


@contextlib.contextmanager
def learner_that_says(*answers):
  """A false learner: gives each answer, a function of what it has heard so far, and then waits."""

  def talk():
    connected, _ = server.accept()
    heard = []
    with connected, contextlib.suppress(OSError):
      for answer in answers:
        heard.append(connected.recv(2**16))
        connected.sendall(answer(heard))
      connected.recv(1)

  with socket.create_server(("127.0.0.1", 0)) as server:
    threading.Thread(target=talk, daemon=True).start()
    yield server.getsockname()


def test_both_sides_prove_the_same_secret_and_then_talk():
  with accepting(SECRET) as (address, outcomes):
    ours = Connection(handshake.join(address, SECRET))
    ours.send("hello", {"a": 1})
  assert Connection(outcomes[0]).receive(0).fields == {"a": 1}


@pytest.mark.parametrize("learner, sampler", [(SECRET, OTHER), (SECRET, OPEN), (OPEN, SECRET)])
def test_different_secrets_are_one_line_on_both_sides(learner, sampler):
  with accepting(learner) as (address, outcomes):
    with pytest.raises(ConfigError, match="the learner has another secret than this sampler: comp"):
      handshake.join(address, sampler)
  assert isinstance(outcomes[0], BadMessage)
  assert "it has another secret than this run: compare rollout.secret_file or" in str(outcomes[0])
  for one, said in ((learner, outcomes[0]),):
    assert ("this side has none" in str(said)) == (not one.secret)


def record(address):
  """What a sampler with the secret sends to a learner, and the learner to it."""
  sent = []

  class Recorded(socket.socket):
    def sendall(self, data):
      sent.append(bytes(data))
      super().sendall(data)

  original = socket.create_connection
  try:
    socket.create_connection = lambda to, timeout: (
      lambda s: (s.settimeout(timeout), s.connect(to), s)[-1]
    )(Recorded())
    handshake.join(address, SECRET).close()
  finally:
    socket.create_connection = original
  return sent


def test_the_secret_does_not_travel_and_nonces_are_fresh():
  with accepting(SECRET, count=2) as (address, _):
    first, second = record(address), record(address)
  assert [len(data) for data in first] == [len(MAGIC) + NONCE, NONCE]
  assert SECRET.secret not in b"".join(first)
  assert not {*first} & {*second}


def raw(address):
  return socket.create_connection(address, timeout=5)


def refused(connected):
  """What a peer hears after its greeting: a nonce, and zeros in the place of a proof."""
  heard = b""
  with contextlib.suppress(ConnectionError):
    while data := connected.recv(1000):
      heard += data
  return heard


def test_replayed_bytes_prove_nothing():
  with accepting(SECRET, count=2) as (address, outcomes):
    sent = record(address)
    with raw(address) as connected:
      connected.sendall(b"".join(sent))
      assert refused(connected)[-NONCE:] == bytes(NONCE)
  assert "another secret" in str(outcomes[1])


def test_a_reflected_proof_proves_nothing():
  """A false learner sends back all that it gets, nonce and proof."""
  with learner_that_says(lambda heard: heard[0], lambda heard: heard[1]) as address:
    with pytest.raises(ConfigError, match="another secret"):
      handshake.join(address, SECRET)


def test_the_proof_of_a_learner_is_none_of_a_sampler():
  with accepting(SECRET) as (address, outcomes), raw(address) as connected:
    connected.sendall(MAGIC + bytes(NONCE))
    nonce = connected.recv(100)[len(MAGIC) :]
    connected.sendall(handshake._proof(SECRET.secret, b"learner", bytes(NONCE), nonce))
    assert refused(connected) == bytes(NONCE)
  assert "another secret" in str(outcomes[0])


def test_a_proof_for_another_nonce_proves_nothing():
  with accepting(SECRET) as (address, outcomes), raw(address) as connected:
    connected.sendall(MAGIC + bytes(NONCE))
    connected.recv(100)
    connected.sendall(handshake._proof(SECRET.secret, b"sampler", bytes(NONCE), b"x" * NONCE))
    assert refused(connected) == bytes(NONCE)
  assert "another secret" in str(outcomes[0])


def test_a_learner_that_does_not_know_the_secret_is_not_joined():
  def greet(_):
    return MAGIC + b"n" * NONCE

  for proof in (b"p" * NONCE, bytes(NONCE)):
    with learner_that_says(greet, lambda heard, proof=proof: proof) as address:
      with pytest.raises(ConfigError, match="another secret"):
        handshake.join(address, SECRET)


@pytest.mark.parametrize("sent", [b"", b"g", MAGIC, MAGIC + bytes(NONCE - 1), MAGIC + bytes(NONCE)])
def test_a_truncated_handshake_ends_with_a_line(sent):
  with accepting(SECRET) as (address, outcomes):
    with raw(address) as connected:
      connected.sendall(sent)
  assert isinstance(outcomes[0], BadMessage | ConnectionError) and str(outcomes[0])


@pytest.mark.parametrize("allowed", [SECRET, OPEN])
@pytest.mark.parametrize("sent", [b"", MAGIC + bytes(3), b"\x16\x03\x01"])
def test_a_peer_that_says_nothing_more_is_not_waited_for(monkeypatch, certificates, allowed, sent):
  monkeypatch.setattr(handshake, "_SECONDS", 0.2)
  if sent.startswith(b"\x16"):
    allowed = access.learner_access(certificates("own"), "127.0.0.1")
  with accepting(allowed) as (address, outcomes), raw(address) as connected:
    connected.sendall(sent)
    started = time.monotonic()
    while not outcomes:
      assert time.monotonic() < started + 5
      time.sleep(0.01)
  assert isinstance(outcomes[0], BadMessage | OSError) and str(outcomes[0])


@pytest.mark.parametrize("begin", [MAGIC, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"])
def test_a_handshake_that_comes_byte_by_byte_is_not_waited_for(monkeypatch, certificates, begin):
  monkeypatch.setattr(handshake, "_SECONDS", 0.3)
  encrypts = begin != MAGIC
  allowed = access.learner_access(certificates("own"), "127.0.0.1") if encrypts else SECRET
  with accepting(allowed) as (address, outcomes):
    with raw(address) as connected, contextlib.suppress(OSError):
      for byte in begin + bytes(NONCE) * 2:
        if not outcomes:
          connected.sendall(bytes([byte]))
          time.sleep(0.02)
      assert outcomes
  assert "timed out" in str(outcomes[0])


def test_a_gigabyte_of_garbage_is_not_read(monkeypatch):
  """Nor parsed: the JSON of whoever has not proven itself reaches nobody."""
  monkeypatch.setattr("json.loads", lambda text: pytest.fail("parsed"))
  block, sent = b'{"kind"' * 2**17, 0
  with accepting(SECRET) as (address, outcomes), raw(address) as connected:
    with contextlib.suppress(OSError):
      for _ in range(2**10):
        connected.sendall(block)
        sent += len(block)
  assert "something else than this version of grpo_jax" in str(outcomes[0])
  assert sent < 2**25  # what the kernel holds


def test_what_listens_there_may_be_something_else():
  with learner_that_says(lambda _: b"HTTP/1.1 400 Bad Request\r\n" + bytes(100)) as address:
    with pytest.raises(BadMessage, match="something else than this version of grpo_jax"):
      handshake.join(address, SECRET)


def test_a_learner_goes_on_under_a_flood_of_wrong_peers(capfd):
  with listening(access=SECRET) as hub:
    process = Process(hub, access=SECRET)
    process.serve()
    ends, tried = threading.Event(), []

    def flood():
      while not ends.is_set():
        with contextlib.suppress(ConfigError, OSError):
          handshake.join(address_of(hub), OTHER)
        tried.append(True)

    threads = [threading.Thread(target=flood) for _ in range(3)]
    for thread in threads:
      thread.start()
    while len(tried) < 50:
      time.sleep(0.01)
    assert_whole([*call(hub)])
    late = Process(hub, access=SECRET)
    late.serve()
    process.connection.end()
    assert_whole([*call(hub)])
    ends.set()
    for thread in threads:
      thread.join()
  told = capfd.readouterr().err.splitlines()
  lines = [line for line in told if "was sent away" in line or "before it joined" in line]
  assert 10 <= len(lines) <= 12


def test_a_sampler_with_another_secret_ends_at_once(capfd):
  run = small_run(small_config())
  with listening(access=SECRET) as hub:
    with pytest.raises(ConfigError, match="the learner has another secret"):
      sample_for(run, address_of(hub), 600, OTHER)
  assert "sent away: it has another secret than this run" in capfd.readouterr().err


# Files and settings.


def written(path, content, mode=0o600):
  path.write_bytes(content)
  path.chmod(mode)
  return str(path)


def test_the_secret_is_in_a_file_or_in_the_environment(tmp_path, monkeypatch):
  monkeypatch.delenv("GRPO_JAX_SECRET", raising=False)
  file = written(tmp_path / "secret", b"  of a file\n")
  in_file = Rollout(secret_file=file)
  for side in (access.learner_access, access.sampler_access):
    assert side(Rollout(), "127.0.0.1") == OPEN
    assert side(in_file, "10.0.0.7").secret == b"of a file"
    monkeypatch.setenv("GRPO_JAX_SECRET", "of the environment\n")
    assert side(Rollout(), "10.0.0.7").secret == b"of the environment"
    assert side(in_file, "10.0.0.7").secret == b"of a file"
    monkeypatch.setenv("GRPO_JAX_SECRET", " \n")
    with pytest.raises(ConfigError, match="environment variable GRPO_JAX_SECRET: it is empty"):
      side(Rollout(), "127.0.0.1")
    monkeypatch.delenv("GRPO_JAX_SECRET")


@pytest.mark.parametrize("side", [access.learner_access, access.sampler_access])
def test_a_file_that_cannot_be_the_secret_is_named(tmp_path, side):
  for content, mode, why in (
    (b" \n", 0o600, "it is empty"),
    (b"secret", 0o640, "other users may read it: chmod 600"),
    (b"secret", 0o604, "other users may read it: chmod 600"),
  ):
    file = written(tmp_path / "secret", content, mode)
    with pytest.raises(ConfigError, match=f"rollout.secret_file={file}: {why}"):
      side(Rollout(secret_file=file), "127.0.0.1")
  for file in (str(tmp_path), str(tmp_path / "none"), os.devnull):
    with pytest.raises(ConfigError, match=f"rollout.secret_file={file}: (it cannot|other users)"):
      side(Rollout(secret_file=file), "127.0.0.1")


@pytest.mark.parametrize("host", ["10.0.0.7", "0.0.0.0", "::", "learner.example.org"])
def test_without_a_secret_only_this_machine_may_join(host, monkeypatch):
  monkeypatch.delenv("GRPO_JAX_SECRET", raising=False)
  with pytest.raises(ConfigError, match="rollout.listen is .* Give both sides a secret"):
    access.learner_access(Rollout(listen=f"{host}:1"), host)
  with pytest.raises(ConfigError, match="not this machine: set rollout.secret_file or GRPO_JAX"):
    access.sampler_access(Rollout(), host)
  for here in ("127.0.0.1", "::1", "localhost", "127.3.2.1"):
    assert access.learner_access(Rollout(), here) == access.sampler_access(Rollout(), here) == OPEN


def test_an_address_that_others_reach_has_a_remark_unless_it_encrypts(capfd, certificates):
  encrypted = access.learner_access(certificates("own"), "127.0.0.1")
  for allowed, remarks in ((SECRET, 1), (encrypted, 0)):
    RemoteSampler(("0.0.0.0", 0), TERMS, LIMITS, access=allowed).close()
    assert capfd.readouterr().err.count("the weights travel unencrypted") == remarks


# Encryption.


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
  """Makes the section rollout of a config with a certificate and its key, which openssl writes."""
  if shutil.which("openssl") is None:
    pytest.skip("the program openssl makes the certificates of this test, and is not installed")
  folder = tmp_path_factory.mktemp("certificates")

  def openssl(*words):
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

  new = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2".split()
  for name in ("own", "authority"):
    openssl("req", "-x509", *new, "-subj", f"/CN={name}", "-keyout", f"{name}.key",
            "-out", f"{name}.pem")  # fmt: skip
  for name, alternative in (("here", "IP:127.0.0.1"), ("there", "DNS:there.example.org")):
    openssl("req", *new, "-subj", "/CN=x", "-keyout", f"{name}.key", "-out", f"{name}.csr")
    (folder / "extensions").write_text(f"subjectAltName={alternative}\n")
    openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "authority.pem", "-CAkey",
            "authority.key", "-CAcreateserial", "-days", "2", "-extfile", "extensions",
            "-out", f"{name}.pem")  # fmt: skip

  def settings(name, **changes):
    files = {
      "certificate_file": str(folder / f"{name}.pem"),
      "key_file": str(folder / f"{name}.key"),
    }
    return Rollout(**files | changes)

  return settings


def secured(certificates, learner, sampler):
  """The access of both sides with the secret and these certificates."""
  return (
    access.learner_access(certificates(learner), "127.0.0.1")._replace(secret=SECRET.secret),
    access.sampler_access(certificates(sampler), "127.0.0.1")._replace(secret=SECRET.secret),
  )


@pytest.mark.parametrize(
  "own, trusted", [("own", "own"), ("here", "authority"), ("there", "there")]
)
def test_a_trusted_certificate_encrypts(certificates, own, trusted):
  learner, sampler = secured(certificates, own, trusted)
  with accepting(learner) as (address, outcomes):
    ours = handshake.join(address, sampler)
  (theirs,) = outcomes
  assert isinstance(ours, Encrypted) and isinstance(theirs, Encrypted)
  array = np.arange(10**6)
  thread = threading.Thread(target=Connection(ours).send, args=("kind", {}, {"x": array}))
  thread.start()
  np.testing.assert_array_equal(Connection(theirs).receive().arrays["x"], array)
  thread.join()


@pytest.mark.parametrize(
  "own, trusted, why",
  [
    ("own", "authority", "certificate is not trusted"),
    ("authority", "own", "certificate is not trusted"),
    ("there", "authority", "certificate is not for 127.0.0.1"),
    ("here", "there", "certificate is not trusted"),
  ],
)
def test_another_certificate_is_refused_before_anything_is_proven(certificates, own, trusted, why):
  learner, sampler = secured(certificates, own, trusted)
  with accepting(learner) as (address, outcomes):
    with pytest.raises(ConfigError, match=why):
      handshake.join(address, sampler)
  assert isinstance(outcomes[0], BadMessage | ConnectionError)
  assert str(outcomes[0]) and "\n" not in str(outcomes[0])


def test_encryption_on_one_side_only_is_one_line_on_both(certificates):
  learner, sampler = secured(certificates, "own", "own")
  with accepting(learner) as (address, outcomes):
    with pytest.raises(ConfigError, match="the learner encrypts: name its certificate"):
      handshake.join(address, SECRET)
  assert "it does not encrypt, and config key rollout.certificate_file is set" in str(outcomes[0])
  with accepting(SECRET) as (address, outcomes):
    with pytest.raises(ConfigError, match="the learner does not encrypt"):
      handshake.join(address, sampler)
  assert "it encrypts, and config key rollout.certificate_file is empty" in str(outcomes[0])


def test_who_reads_late_still_hears_why_it_is_refused():
  """A learner closes its socket while there are bytes that it has not read."""
  with accepting(SECRET) as (address, outcomes), raw(address) as connected:
    connected.sendall(b"\x16\x03\x01" + bytes(500))
    while not outcomes:
      time.sleep(0.01)
    assert connected.recv(100) == MAGIC


def test_the_secret_is_proven_inside_of_the_encryption(certificates):
  learner, sampler = secured(certificates, "own", "own")
  with accepting(learner) as (address, outcomes):
    with pytest.raises(ConfigError, match="another secret"):
      handshake.join(address, sampler._replace(secret=OTHER.secret))
  assert "another secret" in str(outcomes[0])


def test_garbage_that_looks_like_tls_ends_with_a_line(certificates):
  learner, _ = secured(certificates, "own", "own")
  with accepting(learner) as (address, outcomes), raw(address) as connected:
    connected.sendall(b"\x16\x03\x01\xff\xff" + bytes(2**20))
    refused(connected)
  assert "it did not agree on TLS" in str(outcomes[0])


def encrypted_pair(certificates):
  learner, sampler = secured(certificates, "own", "own")
  with accepting(learner) as (address, outcomes):
    ours = handshake.join(address, sampler)
  return ours, outcomes[0]


def test_both_ends_send_and_receive_much_at_once(certificates):
  """Neither end reads before it has sent all, but for its other thread."""
  ends = [Connection(end) for end in encrypted_pair(certificates)]
  sent = [np.random.default_rng(i).integers(0, 256, 3 * 10**7, np.uint8) for i in range(2)]
  got = {}

  def receive(i):
    got[i] = [ends[i].receive().arrays["x"] for _ in range(3)]

  def send(i):
    for _ in range(3):
      ends[i].send("kind", {}, {"x": sent[i]})

  threads = [threading.Thread(target=f, args=(i,)) for f in (receive, send) for i in range(2)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60)
  for i in range(2):
    for array in got[i]:
      np.testing.assert_array_equal(array, sent[1 - i])


def test_what_is_changed_on_the_way_ends_an_encrypted_connection(certificates):
  ours, theirs = encrypted_pair(certificates)
  with ours._working:
    ours._tls.write(b"some text")
    record = bytearray(ours._leaving.read())
  record[-1] ^= 1
  ours._socket.sendall(record)
  with pytest.raises(OSError, match="(?i)mac|record"):
    theirs.recv_into(memoryview(bytearray(10)))


@pytest.mark.parametrize(
  "changes, why",
  [
    ({"key_file": ""}, "certificate and its key without a password"),
    ({"certificate_file": "/none"}, "rollout.certificate_file=/none: it cannot be read"),
    ({"key_file": "/none"}, "rollout.key_file=/none: it cannot be read"),
  ],
)
def test_files_that_cannot_encrypt_are_named(certificates, tmp_path, changes, why):
  own = certificates("own")
  readable = written(tmp_path / "readable.key", open(own.key_file, "rb").read(), 0o644)
  closed = written(tmp_path / "own.pem", open(own.certificate_file, "rb").read())
  if changes == {"key_file": ""}:
    own = dataclasses.replace(own, certificate_file=closed)
  with pytest.raises(ConfigError, match=why):
    access.learner_access(dataclasses.replace(own, **changes), "127.0.0.1")
  with pytest.raises(ConfigError, match="rollout.key_file=.*: other users may read it"):
    access.learner_access(dataclasses.replace(own, key_file=readable), "127.0.0.1")
  for content in (b"", b"text", b"-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n"):
    file = written(tmp_path / "wrong.pem", content)
    with pytest.raises(ConfigError, match=f"{file}: it must be the certificate of the learner"):
      access.sampler_access(Rollout(certificate_file=file), "127.0.0.1")


def test_a_key_with_a_password_is_refused_and_nobody_is_asked(certificates, tmp_path):
  own, file = certificates("own"), tmp_path / "encrypted.key"
  subprocess.run(
    ["openssl", "ec", "-in", own.key_file, "-aes256", "-passout", "pass:x", "-out", str(file)],
    check=True,
    capture_output=True,
  )
  file.chmod(0o600)
  with pytest.raises(ConfigError, match="without a password"):
    access.learner_access(dataclasses.replace(own, key_file=str(file)), "127.0.0.1")


def test_the_names_in_a_certificate():
  says = {
    "subjectAltName": (
      ("DNS", "A.example.org"),
      ("DNS", "*.b.org"),
      ("IP Address", "10.0.0.7"),
      ("IP Address", "2001:DB8:0:0:0:0:0:1\n"),
      ("DNS", "10.0.0.9"),
    )
  }
  for host in ("a.example.org", "A.EXAMPLE.ORG.", "x.b.org", "10.0.0.7", "2001:db8::1"):
    assert names(says, host)
  for host in (
    "b.org",
    "x.y.b.org",
    ".b.org",
    "example.org",
    "10.0.0.8",
    "10.0.0.9",
    "",
    "*.b.org.x",
  ):
    assert not names(says, host)
  assert not names({}, "a")


# Damage.


class Damages:
  """A socket that changes one byte of all that it sends."""

  def __init__(self, connected, place):
    self._socket, self._place, self._sent = connected, place, 0

  def sendall(self, data):
    data = bytearray(data)
    if 0 <= self._place - self._sent < len(data):
      data[self._place - self._sent] ^= 4
    self._sent += len(data)
    self._socket.sendall(data)

  def __getattr__(self, name):
    return getattr(self._socket, name)


def test_damage_of_any_byte_is_found_and_the_array_is_named():
  """Also in the checksums themselves."""
  arrays = {"first": np.arange(3, dtype=np.int16), "second": np.arange(2, dtype=np.float32)}

  def received(place):
    ours, other = pair()
    ours._socket = Damages(ours._socket, place)
    ours.send("kind", {"a": 1}, arrays)
    ours.close()
    with contextlib.closing(Connection(other)) as theirs:
      theirs.receive(2**20)
    return ours._socket._sent

  size = received(-1)
  last = {"second": 2 * 4 + 4, "first": 3 * 2 + 4, "header": size - (2 * 4 + 4) - (3 * 2 + 4)}
  named = [name for name, length in [*last.items()][::-1] for _ in range(length)]
  for place, name in enumerate(named):
    with pytest.raises(DamagedMessage, match=f"{name}.* arrived damaged: its checksum is wrong"):
      received(place)


def test_damaged_completions_are_drawn_again_and_their_process_may_come_back(capfd):
  with listening() as hub:
    process, parts = Process(hub), []
    coming = threading.Thread(target=lambda: parts.extend(call(hub)))
    coming.start()
    asked = process.asked()
    process.connection._socket = Damages(process.connection._socket, 800)
    with contextlib.suppress(OSError):
      process.send(asked, [*range(4)])
    with pytest.raises(OSError, match="closed|reset"):  # and not a message that sends it away
      process.next()
    assert parts == []
    Process(hub).serve()
    coming.join()
    assert_whole(parts)
  assert "arrived damaged: its checksum is wrong" in capfd.readouterr().err


def test_damaged_weights_are_named_and_sent_again_and_draw_nothing(capfd, monkeypatch):
  run = small_run(small_config())
  params = run.parameters.for_sampling(run.initial_params())
  original, connections = handshake.accept, []

  def accept(connected, allowed):
    """The first connection changes a byte in the middle of the weights."""
    channel = original(connected, allowed)
    connections.append(channel)
    return Damages(channel, 5000) if len(connections) == 1 else channel

  monkeypatch.setattr(handshake, "accept", accept)
  with listening(terms=terms_of(run), limits=limits_of(run)) as hub:
    with sampling_for(run, address_of(hub)):
      prompts_PS = np.ones((P, 12), np.int32)
      draws = Draws(jax.random.key(3))
      parts = [*arriving(hub.begin(params, prompts_PS, np.full(P, 12, np.int32), 2, draws))]
      hub.say_ended()
      hub.close()
  here = run.programs.sampler()(params, prompts_PS, np.full(P, 12, np.int32), 2, draws)
  np.testing.assert_array_equal(whole(parts).tokens_PGT, whole([*here]).tokens_PGT)
  out = capfd.readouterr().out
  assert len(connections) == 2
  assert "trying again: the array '" in out
  assert "of 'weights' arrived damaged: its checksum is wrong" in out


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_run_that_encrypts_has_the_same_numbers(tmp_path, certificates):
  here = trained(config_of(tmp_path, max_staleness=1), tmp_path / "here")
  own, address = certificates("own"), ("127.0.0.1", free_port())
  files = {
    "secret_file": written(tmp_path / "secret", b"a secret of this test\n"),
    "certificate_file": own.certificate_file,
    "key_file": own.key_file,
  }
  config = config_of(tmp_path, max_staleness=1, listen=f"127.0.0.1:{address[1]}", **files)
  with sampling_for(small_run(config), address, access.sampler_access(config.rollout, address[0])):
    there = trained(config, tmp_path / "there")
  jax.tree.map(np.testing.assert_array_equal, here, there)
  saved = (tmp_path / "there/config.json").read_text()
  assert files["secret_file"] in saved and "a secret of this test" not in saved


def test_a_key_without_its_certificate_is_refused():
  with pytest.raises(ConfigError, match="rollout.key_file is 'a.key': name the certificate"):
    small_run(with_section(small_config(), "rollout", key_file="a.key"))


def test_the_files_of_a_config_have_absolute_paths(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for name in ("secret_file", "certificate_file", "key_file"):
    (tmp_path / name).touch()
    config = with_absolute_paths(with_section(small_config(), "rollout", **{name: name}))
    assert getattr(config.rollout, name) == str(tmp_path / name)
