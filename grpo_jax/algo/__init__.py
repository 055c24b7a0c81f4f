"""The algorithm, arrays to arrays: advantages, ratios, surrogates, KL, and their objective.

It may import types, masked, settings and registry. `objective.py` is GRPO's equation.
"""
