"""Texts to token ids and back, and conversations to texts.

They may import settings and what lies below them, and never jax.
"""
