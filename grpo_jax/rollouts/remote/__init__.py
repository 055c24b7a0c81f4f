"""Sampler processes: others draw completions for a run, on this machine or on other ones.

`learner.py` is the run's side and `sampler.py` that of the others. `messages.py` is what they send
each other, `contents.py` what these may hold, and `terms.py` what both must have in common. Nothing
here knows rewards or steps.
"""
