"""Runs untrusted programs, and counts the tests that they pass.

Its modules may import settings, problems/ and, from grpo_jax.rewards, only RewardError.
"""
