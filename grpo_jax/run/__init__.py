"""The parts of a run: parameters on the mesh, compiled functions, what fits, what is refused.

It may import model/, sampler/, learner/, data/, environments/ and what lies below them.
"""
