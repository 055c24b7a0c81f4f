"""Runs programs that nobody has read, and counts the tests that they pass.

It may import settings and, of the room above, RewardError alone.
"""
