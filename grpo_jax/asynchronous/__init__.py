"""Groups drawn before the step that learns from them, by this process or by sampler processes.

`learner.py` is the run's side of a sampler process and `sampler.py` the other side. `access.py`
reads their secret and certificates, `handshake.py` proves that both know the secret, and
`encryption.py` is TLS. `messages.py` sends messages between them, and `contents.py` checks the
fields and arrays in these. `versions.py` says which weights a process has, and `terms.py` what both
sides must agree on. It may import batches/ and the folders below it.
"""
