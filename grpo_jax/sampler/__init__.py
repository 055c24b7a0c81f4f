"""Decoding: takes requests, returns tokens and log-probs.

`rows.py` has the decoding loop, which calls a step function and knows no model. `seats.py` assigns
rows to seats of the batch. `programs.py` compiles the loop with a model, and `prefixes.py` adds the
programs of a prefix cache. `stream.py` is the scheduler, for which `pieces.py` computes prompts.
This package may import model/, parallel/ and the packages below them.
"""
