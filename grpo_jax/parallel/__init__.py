"""The mesh, the table of shardings, chip data, and moving arrays between processes and the mesh.

It may import model/, config and the modules below them.
"""
