"""Who may join a run: its secret and its certificate, from the settings of each side."""

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
  """The secret and certificates with which one side lets the other in.

  Attributes:
    secret: The secret, the same on both sides. Empty for none.
    tls: The context that encrypts, or None.
    trusted: The certificates that a sampler trusts, as bytes (DER).
  """

  secret: bytes = b""
  tls: ssl.SSLContext | None = None
  trusted: tuple[bytes, ...] = ()


OPEN = Access()  # lets every process join that reaches the port


def learner_access(rollout: Rollout, host: str) -> Access:
  """The access that a learner listening at `host` gives.

  Raises:
    ConfigError: A file cannot be used, or other machines could join without a secret.
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
  context.num_tickets = 0  # no session is resumed
  pair = {"certificate_file": rollout.certificate_file}
  if rollout.key_file:
    pair["key_file"] = rollout.key_file
  for key, file in pair.items():
    _content(key, file, is_private=key == [*pair][-1])
  try:
    context.load_cert_chain(*pair.values(), password=lambda: "")  # which never asks the terminal
  except (OSError, ValueError) as error:
    named = " and ".join(f"config key rollout.{key}={file}" for key, file in pair.items())
    raise ConfigError(
      f"{named}: it must be a certificate and its key without a password, in PEM ({error})"
    ) from None
  return Access(secret, context)


def sampler_access(rollout: Rollout, host: str) -> Access:
  """The access with which a sampler joins a learner at `host`.

  Raises:
    ConfigError: A file cannot be used, or the learner is another machine and there is no secret.
  """
  secret = _secret(rollout.secret_file)
  if not secret and not is_loopback(host):
    raise ConfigError(
      f"flag --learner names {host}, which is not this machine: set {SECRETS}, as for the run"
    )
  if not rollout.certificate_file:
    return Access(secret)
  text = _content("certificate_file", rollout.certificate_file).decode("ascii", "replace")
  context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
  context.minimum_version = ssl.TLSVersion.TLSv1_3
  context.check_hostname = False  # the handshake compares names, unless it knows the certificate
  context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the learner's own is enough
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
  """The secret from a file, or from the environment if no file is named. Empty for none."""
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
  """The bytes of the file that a key of the section rollout names."""
  name = f"config key rollout.{key}"
  path = path_of(file, name)
  try:
    if is_private and path.stat().st_mode & 0o077:
      raise ConfigError(f"{name}={file}: other users may read it: chmod 600 {file}")
    return files.read_bytes(path)
  except OSError as error:
    raise ConfigError(f"{name}={file}: it cannot be read ({error})") from None
