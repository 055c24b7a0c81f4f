"""The built-in reward functions, by subject. `names.py` sets their names.

These modules may import sandbox/, and the modules that mark and call functions (marks, call,
answer), but not jax.
"""
