"""Samples groups before the step that learns from them, in this process or in sampler processes.

`learner.py` is the run's end of the connection to a sampler process, and `sampler.py` the other
end. `access.py` reads their secret and certificates, `handshake.py` proves that both know the
secret, and `encryption.py` is TLS. `messages.py` sends messages, and `contents.py` checks the
fields and arrays in them. `versions.py` tracks which weights a process has, and `terms.py` lists
what both sides must agree on. This package may import batches/ and the packages below it.
"""
