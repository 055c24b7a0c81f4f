"""Problems that `data` poses and `rewards` scores: programs with tests, and reasoning_gym's tasks.

Both packages import it, but not each other. It may import the same as config.
"""
