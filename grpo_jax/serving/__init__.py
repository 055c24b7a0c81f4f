"""An OpenAI-compatible endpoint: an engine that decodes the rows of many requests together.

`requests.py` and `answers.py` are pure functions from JSON and to JSON, `engine.py` is the thread
that decodes, and `server.py` is the one file that speaks HTTP. It may import run/, sampler/,
data/ and what lies below them, and `server.py` the package aiohttp.
"""
