"""Both sides of a new connection prove to each other that they know the same secret.

    sampler -> learner   magic, a random nonce
    learner -> sampler   magic, a random nonce
    sampler -> learner   HMAC-SHA256(secret, "sampler", both nonces)
    learner -> sampler   HMAC-SHA256(secret, "learner", both nonces), or zeros

The secret itself is never sent. A proof is useless on another connection or for the other role.
Before the proofs are checked, each side reads only 72 bytes and does not parse them. With a
certificate, all of this is encrypted.
"""

import contextlib
import hmac
import ipaddress
import secrets
import socket
import ssl
import time
from typing import Any

from grpo_jax.asynchronous.access import SECRETS, Access
from grpo_jax.asynchronous.encryption import Encrypted, NotEncrypted
from grpo_jax.asynchronous.messages import BadMessage
from grpo_jax.settings import ConfigError

_SECONDS = 10.0  # the time limit of the whole handshake
_MAGIC, _NEEDS_TLS = b"grpojax2", b"grpo_tls"
_NONCE = 32
_HANDSHAKE_OF_TLS = b"\x16"  # the first byte of a TLS handshake


def accept(connected: socket.socket, access: Access) -> socket.socket | Encrypted:
  """Performs the learner's side of the handshake.

  Args:
    connected: A TCP socket, which the caller closes.
    access: The secret and certificates of the learner.

  Returns:
    The channel for messages: the socket, or an encrypted one.

  Raises:
    BadMessage: The sampler does not know the secret, or only one side encrypts.
    OSError: The sampler is gone or silent.
  """
  until = time.monotonic() + _SECONDS
  connected.settimeout(_SECONDS)
  connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # sends short messages at once
  try:
    first_byte = connected.recv(1, socket.MSG_PEEK)  # stays in the socket
  except TimeoutError:
    raise BadMessage("it said nothing") from None
  channel: socket.socket | Encrypted = connected
  if first_byte == _HANDSHAKE_OF_TLS:
    if access.tls is None:
      connected.sendall(_MAGIC)  # tells the sampler that this side does not speak TLS
      raise BadMessage(
        "it encrypts, and config key rollout.certificate_file is empty here; set it on both sides"
      )
    try:
      channel = Encrypted(connected, access.tls, until)
    except ssl.SSLError as error:
      raise BadMessage(f"it did not agree on TLS: {_reason(error)}") from None
  their_nonce = _nonce(_read(channel, len(_MAGIC) + _NONCE, until))
  if access.tls is not None and channel is connected:
    connected.sendall(_NEEDS_TLS + bytes(_NONCE))  # as long as the answer that the sampler reads
    raise BadMessage(
      "it does not encrypt, and config key rollout.certificate_file is set here; set it on both"
      " sides"
    )
  our_nonce = secrets.token_bytes(_NONCE)
  channel.sendall(_MAGIC + our_nonce)
  proof = _read(channel, _NONCE, until)
  if not hmac.compare_digest(proof, _proof(access.secret, b"sampler", their_nonce, our_nonce)):
    channel.sendall(bytes(_NONCE))  # no proof: the sampler then reports different secrets
    raise BadMessage(f"it has another secret than this run: {_compare(access)}")
  channel.sendall(_proof(access.secret, b"learner", their_nonce, our_nonce))
  return channel


def join(address: tuple[str, int], access: Access) -> socket.socket | Encrypted:
  """Connects a sampler to a learner, and performs the sampler's side of the handshake.

  Args:
    address: Host and port of the learner.
    access: The secret and certificates of the sampler.

  Returns:
    The channel for messages: the socket, or an encrypted one.

  Raises:
    ConfigError: Secrets or certificates do not match, so another attempt would fail, too.
    BadMessage: Another program listens at the address.
    OSError: Nothing listens at the address, or it does not answer.
  """
  until = time.monotonic() + _SECONDS
  connected = socket.create_connection(address, timeout=_SECONDS)
  try:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    channel = _encrypted(connected, address[0], access, until) if access.tls else connected
    our_nonce = secrets.token_bytes(_NONCE)
    channel.sendall(_MAGIC + our_nonce)
    answer = _read(channel, len(_MAGIC) + _NONCE, until)
    if answer.startswith(_NEEDS_TLS):
      raise ConfigError(
        "the learner encrypts: name its certificate, or that of its authority, in"
        " rollout.certificate_file"
      )
    their_nonce = _nonce(answer)
    channel.sendall(_proof(access.secret, b"sampler", our_nonce, their_nonce))
    answer = _read(channel, _NONCE, until)
    if not hmac.compare_digest(answer, _proof(access.secret, b"learner", our_nonce, their_nonce)):
      raise ConfigError(f"the learner has another secret than this sampler: {_compare(access)}")
  except BaseException:
    connected.close()
    raise
  return channel


def _proof(secret: bytes, role: bytes, sampler_nonce: bytes, learner_nonce: bytes) -> bytes:
  """The proof that the side with this role knows the secret, for a connection with these nonces."""
  return hmac.digest(secret, _MAGIC + role + sampler_nonce + learner_nonce, "sha256")


def _nonce(greeting: bytes) -> bytes:
  """The nonce after the magic. Raises BadMessage for another magic."""
  if not greeting.startswith(_MAGIC):
    raise BadMessage("it sent something else than this version of grpo_jax does")
  return greeting.removeprefix(_MAGIC)


def _compare(access: Access) -> str:
  """Advice to the user about different secrets."""
  own = "" if access.secret else ", and this side has none"
  return f"compare {SECRETS} of both sides{own}"


def _read(channel: socket.socket | Encrypted, size: int, until: float) -> bytes:
  """Reads exactly `size` bytes. Raises OSError if they do not arrive before `until`."""
  data, done = bytearray(size), 0
  while done < size:
    channel.settimeout(max(1e-3, until - time.monotonic()))
    count = channel.recv_into(memoryview(data)[done:])
    if not count:
      raise ConnectionError("the connection was closed before it was proven")
    done += count
  return bytes(data)


def _encrypted(connected: socket.socket, host: str, access: Access, until: float) -> Encrypted:
  """Starts TLS with a learner at `host`.

  Raises ConfigError if it does not encrypt, or if its certificate is not trusted or not for `host`.
  """
  assert access.tls is not None
  try:
    channel = Encrypted(connected, access.tls, until, host)
  except NotEncrypted:
    raise ConfigError(
      "the learner does not encrypt: set rollout.certificate_file for the run, too, or leave it"
      " empty here"
    ) from None
  except ssl.SSLCertVerificationError as error:
    raise ConfigError(
      f"the learner's certificate is not trusted ({error.verify_message}): name it, or that of its"
      " authority, in rollout.certificate_file"
    ) from None
  certificate, fields = channel.certificate()
  # The sampler may have the learner's certificate itself. Then this proves that it is the learner,
  # at any host. A certificate that an authority signed must be for the host.
  if certificate not in access.trusted and not names(fields, host):
    raise ConfigError(
      f"the learner's certificate is not for {host}: connect to a name in it, or name this"
      " certificate itself in rollout.certificate_file"
    )
  return channel


def names(certificate: dict[str, Any], host: str) -> bool:
  """Whether a certificate is for a host.

  Args:
    certificate: As `ssl.SSLSocket.getpeercert` returns it.
    host: A name or an address.
  """
  try:
    address = ipaddress.ip_address(host)
  except ValueError:
    address = None
  for kind, name in certificate.get("subjectAltName", ()):
    if kind == "IP Address" and address is not None:
      with contextlib.suppress(ValueError):
        if ipaddress.ip_address(name.strip()) == address:  # OpenSSL may end it with a newline
          return True
    if kind == "DNS" and address is None:
      wanted = host.lower().rstrip(".")
      first, _, rest = wanted.partition(".")
      # A wildcard matches the first label of a name and nothing else.
      if name.lower() == wanted or (first and name.lower() == f"*.{rest}"):
        return True
  return False


def _reason(error: ssl.SSLError) -> str:
  return str(error.reason or error).replace("_", " ").lower()
