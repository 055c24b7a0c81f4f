"""Shows the progress of a run, stops it on signals, and ends a program.

The package may import storage/, data/ and the packages below them. It does not compute.
"""
