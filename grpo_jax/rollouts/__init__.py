"""Prompts in, scored groups out: sampling, rewards, dynamic sampling and the curriculum.

It may import programs/, rewards/ and what lies below them. It changes no parameters.
"""
