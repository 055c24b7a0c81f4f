"""The data of a run: tasks, tokenizers, prompts, and a loader that is a pure function of the step.

The package never imports jax.
"""
