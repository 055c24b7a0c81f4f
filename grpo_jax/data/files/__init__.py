"""Rows of files: jsonl, Parquet, CSV, JSON and TensorFlow Datasets, for any task.

These modules may import settings and the modules below it, and never jax.
"""
