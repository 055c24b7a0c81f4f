"""Decoding: a step function and first logits in, tokens and log-probs out. It knows no model.

It may import types alone. `rows.py` is the loop, `seats.py` says which rows are in it.
"""
