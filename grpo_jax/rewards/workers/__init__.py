"""Worker processes that call reward functions, and that can be killed at any time.

They may import how a function is found and called (names, marks, call, answer), and never jax.
`pool.py` is the way in.
"""
