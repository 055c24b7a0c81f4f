"""Measures accuracy with intervals, and loads policies to sample from, evaluate and export.

This package may import scoring/, storage/, console/ and the folders below them.
"""
