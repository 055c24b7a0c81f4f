"""Games, environments, harnesses and tools of other packages, imported where they are used.

It may import what environments/ may.
"""
