"""The training loop: its two kinds of steps, its state and its reports.

It may import every package except around/, which is above it.
"""
