"""Rows of files: jsonl, Parquet, and what TensorFlow Datasets prepared. They know no task.

They may import settings and what lies below them, and never jax.
"""
