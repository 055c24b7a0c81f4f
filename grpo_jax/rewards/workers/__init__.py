"""Worker processes that call reward functions, and that can be killed at any time.

They may import how a function is called (call, answer), and never jax. `pool.py` is the way in.
"""
