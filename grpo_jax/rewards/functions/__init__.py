"""The built-in reward functions, a subject a file. `names.py` gives them their names.

They may import sandbox/ and how a function is marked and called (marks, call, answer), never jax.
"""
