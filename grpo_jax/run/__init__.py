"""Builds a run: config checks, parameters on the mesh, compiled functions, memory estimates.

These modules may import model/, sampler/, learner/, data/, environments/ and lower layers.
"""
