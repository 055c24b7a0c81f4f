"""The algorithm as functions of arrays: advantages, ratios, surrogates, KL, and their objective.

It may import types, masked, lazy, settings and registry. `objective.py` is GRPO's equation.
"""
