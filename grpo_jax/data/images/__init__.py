"""Images of prompts: reads them within limits and cuts them into patches for a vision tower.

Each image processor has its own file. The modules use Pillow and numpy, but not jax or tokenizers.
"""
