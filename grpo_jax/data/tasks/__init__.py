"""Tasks: training and test examples, generated or made from the rows of files.

These modules may import files/, and never jax.
"""
