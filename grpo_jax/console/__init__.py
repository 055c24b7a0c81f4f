"""Shows a run to a person, stops it by signals, and ends a program.

It may import storage/, data/ and what lies below them. It computes nothing.
"""
