"""Programs that run in a sandbox, with the standard library alone.

Their folder is on the path there. Outside of it, only `values` is imported, to write
what they read.
"""
