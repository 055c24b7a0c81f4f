"""Images of prompts: read within limits, and made into the patches that a vision tower sees.

One file per kind of image processor. Pillow and numpy alone. Imports neither jax nor tokenizers.
"""
