"""Rollouts of several turns: with tools and environments, or played by a harness.

It may import what rollouts/ may.
"""
