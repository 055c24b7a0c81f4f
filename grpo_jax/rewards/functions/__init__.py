"""The built-in reward functions, a subject a file.

They may import what a function is (marks, options) and sandbox/, and never jax.
"""
