"""Accuracy with intervals, and a loaded policy to sample from, to evaluate and to export.

It may import rollouts/, storage/, console/ and what lies below them.
"""
