"""Play: completions of prompts, alone or in turns with tools, environments and harnesses.

It may import run/, serving/, environments/ and what lies below them. It knows no rewards.
"""
