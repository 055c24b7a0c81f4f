"""Scores completions with reward functions, reward models and a teacher.

This package may import rollouts/, rewards/, run/ and the folders below them.
"""
