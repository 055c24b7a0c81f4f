"""Groups drawn before the step that learns from them, by this process or by sampler processes.

`learner.py` is the run's side of a sampler process and `sampler.py` the other one. `messages.py` is
what they send each other, `contents.py` what these may hold, and `terms.py` what both must have in
common. It may import batches/ and what lies below them.
"""
