"""Accuracy with intervals, and a loaded policy to sample from, to evaluate and to export.

It may import scoring/, storage/, console/ and what lies below them.
"""
