"""Worker processes that call reward functions, and that can be killed at any time.

These modules may import the modules that find and call functions (names, marks, call, answer), but
not jax. `pool.py` is the entry point.
"""
