"""What a person sees of a run, how signals stop it, and how a program ends.

It may import storage/, data/ and what lies below them. It computes nothing.
"""
