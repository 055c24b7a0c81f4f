"""Programs that run in a sandbox, with the standard library alone.

Inside the sandbox this folder is on the path. Outside it, only `values` is imported, to encode
inputs.
"""
