"""Plans a run on chips that need not exist: memory and work, as XLA compiles its programs.

This package may import run/, console/ and the packages below them. It runs no program of a run.
"""
