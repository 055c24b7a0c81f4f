"""The mesh, the table of shardings, the chips, and what moves arrays between processes and mesh.

It may import settings and timing.
"""
