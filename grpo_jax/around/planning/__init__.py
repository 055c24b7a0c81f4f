"""Plans a run on chips that need not be there: memory, operations and bytes, by the compiler.

It may import run/, console/ and what lies below them. It runs nothing.
"""
