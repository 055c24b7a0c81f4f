"""Converts texts to token ids and back, and conversations to texts.

These modules may import settings and the modules below it, and never jax.
"""
