"""The groups that a step learns from: chosen, drawn and scored, the batch and its metrics.

It may import scoring/, rollouts/ and what lies below them. It changes no parameters.
"""
