"""Completes prompts with the policy, with or without tools, environments and harnesses.

It may import run/, serving/, environments/ and the folders below them. It does not know rewards.
"""
