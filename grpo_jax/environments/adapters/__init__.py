"""Games, environments, harnesses and tools of other packages, imported where they are used.

It may import the same folders as environments/.
"""
