"""Decoding: requests in, tokens and log-probs out.

`rows.py` is the loop, which takes a step function and knows no model. `seats.py` says which rows
are in it. `programs.py` compiles both with a model, and `prefixes.py` what a prefix cache
needs. It may import model/, parallel/ and what lies below them.
"""
