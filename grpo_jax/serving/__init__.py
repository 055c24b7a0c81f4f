"""An OpenAI-compatible endpoint: an engine that decodes the rows of many requests together.

`requests.py` parses JSON and `answers.py` makes JSON. `engine.py` has the thread that decodes.
Only `server.py` and `connections.py` use HTTP and the package aiohttp. This package may import
run/, sampler/, data/ and the packages below them.
"""
