"""Problems that `data` poses and `rewards` judges: programs with tests, and tasks of reasoning_gym.

It lies below both rooms, because these do not import each other. It may import what config may.
"""
