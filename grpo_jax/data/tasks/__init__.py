"""Tasks: the training and test examples of a problem, generated or made of the rows of files.

They may import files/ beside them, and never jax.
"""
