"""Reads the secret and the certificates by which a learner and its samplers trust each other."""

import os
import re
import ssl
from typing import NamedTuple

from grpo_jax import files
from grpo_jax.config import Rollout
from grpo_jax.settings import ConfigError, is_loopback, path_of

_VARIABLE = "GRPO_JAX_SECRET"
SECRETS = f"rollout.secret_file or {_VARIABLE}"
_CERTIFICATE = re.compile("-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


class Access(NamedTuple):
  """The secret and the certificates of one side of a connection.

  Attributes:
    secret: The secret, which both sides share. Empty if there is none.
    tls: The TLS context, or None for a connection without encryption.
    trusted: The certificates that a sampler trusts, in DER.
  """

  secret: bytes = b""
  tls: ssl.SSLContext | None = None
  trusted: tuple[bytes, ...] = ()


OPEN = Access()  # any process that reaches the port may join


def learner_access(rollout: Rollout, host: str) -> Access:
  """Reads the access of a learner that listens at `host`.

  Raises:
    ConfigError: A file is missing or invalid, or other machines could join without a secret.
  """
  secret = _secret(rollout.secret_file)
  if not secret and not is_loopback(host):
    raise ConfigError(
      f"config key rollout.listen is {rollout.listen!r}: whoever reaches this address could read"
      f" the weights and draw for the run. Give both sides a secret ({SECRETS}), or listen at"
      " 127.0.0.1"
    )
  if not rollout.certificate_file:
    return Access(secret)
  context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
  context.minimum_version = ssl.TLSVersion.TLSv1_3
  context.num_tickets = 0  # no tickets, because sessions are never resumed
  pem_files = {"certificate_file": rollout.certificate_file}
  if rollout.key_file:
    pem_files["key_file"] = rollout.key_file
  has_private_key = [*pem_files][-1]  # without a key file, that of the certificate has the key, too
  for key, file in pem_files.items():
    _content(key, file, is_private=key == has_private_key)  # only checks it: OpenSSL reads it again
  try:
    # With a password function, OpenSSL does not ask for a password at the terminal.
    context.load_cert_chain(*pem_files.values(), password=lambda: "")
  except (OSError, ValueError) as error:
    named = " and ".join(f"config key rollout.{key}={file}" for key, file in pem_files.items())
    raise ConfigError(
      f"{named}: it must be a certificate and its key without a password, in PEM ({error})"
    ) from None
  return Access(secret, context)


def sampler_access(rollout: Rollout, host: str) -> Access:
  """Reads the access of a sampler that joins a learner at `host`.

  Raises:
    ConfigError: A file is missing or invalid, or `host` is another machine and there is no secret.
  """
  secret = _secret(rollout.secret_file)
  if not secret and not is_loopback(host):
    raise ConfigError(
      f"flag --learner names {host}, which is not this machine: set {SECRETS}, as for the run"
    )
  if not rollout.certificate_file:
    return Access(secret)
  # A file may have text in any encoding around its certificates.
  text = _content("certificate_file", rollout.certificate_file).decode("ascii", "replace")
  context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
  context.minimum_version = ssl.TLSVersion.TLSv1_3
  # `handshake` compares the host with the certificate, unless it trusts the certificate itself.
  context.check_hostname = False
  context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # trusts the learner's certificate itself
  try:
    trusted = tuple(map(ssl.PEM_cert_to_DER_cert, _CERTIFICATE.findall(text)))
    context.load_verify_locations(cadata=b"".join(trusted))
  except (OSError, ValueError) as error:
    raise ConfigError(
      f"config key rollout.certificate_file={rollout.certificate_file}: it must be the certificate"
      f" of the learner or of its authority, in PEM ({error})"
    ) from None
  return Access(secret, context, trusted)


def _secret(file: str) -> bytes:
  """Reads the secret from a file, or from the environment if `file` is "". b"" if there is none."""
  if file:
    name, secret = f"config key rollout.secret_file={file}", _content("secret_file", file, True)
  elif _VARIABLE in os.environ:
    name, secret = f"environment variable {_VARIABLE}", os.environb[_VARIABLE.encode()]
  else:
    return b""
  secret = secret.strip()
  if not secret:
    raise ConfigError(f"{name}: it is empty; write a long random secret into it")
  return secret


def _content(key: str, file: str, is_private: bool = False) -> bytes:
  """Reads the file in config key rollout.KEY. Refuses a private file that other users may read."""
  name = f"config key rollout.{key}"
  path = path_of(file, name)
  try:
    if is_private and path.stat().st_mode & 0o077:
      raise ConfigError(f"{name}={file}: other users may read it: chmod 600 {file}")
    return files.read_bytes(path)
  except OSError as error:
    raise ConfigError(f"{name}={file}: it cannot be read ({error})") from None
