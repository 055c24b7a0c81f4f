"""The parameters on the mesh and the compiled functions: what a config describes, ready to run.

It may import learner/, sampler/, model/, data/ and what lies below. It holds no state of a run.
"""
