"""Groups drawn before the step that learns from them, by this process or by sampler processes.

`learner.py` is the run's side of a sampler process and `sampler.py` the other one. `access.py`
reads their secret and certificates, `handshake.py` proves that both know it, and `encryption.py` is
TLS. `messages.py` is what they send each other, `contents.py` what these may hold, `versions.py`
which weights, and `terms.py` what both must have in common. It may import batches/ and what lies
below them.
"""
