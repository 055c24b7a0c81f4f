"""Decoding: a step function and first logits in, tokens and log-probs out. It knows no model.

It may import types alone. `decode.py` is the loop.
"""
