"""Scores completions: calls reward functions for them, reward models and a teacher.

It may import rollouts/, rewards/, run/ and what lies below them.
"""
