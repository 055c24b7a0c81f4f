"""Forms the batch that a step learns from: chooses prompts, draws and scores groups, and measures.

This package may import scoring/, rollouts/ and the packages below them. It changes no parameters.
"""
