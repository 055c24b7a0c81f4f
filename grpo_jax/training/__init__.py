"""The loop, its two kinds of steps, its state, and what it reports.

It may import every room but around/, which lies above it.
"""
