"""Lets an external engine, vLLM or SGLang, draw completions instead of the sampler.

`groups.py` is a `GroupSampler`: it turns requests for groups into rows. `servers.py` shares rows
among the servers and knows which of them are reachable. `vllm.py` and `sglang.py` send requests to
a server through `client.py`, and build the command line that starts it. They share `server.py`, and
`engines.py` lists them. `weights.py` writes the weights into folders, and `proof.py` finds out
whether a server has loaded them. `drawn.py` records the rows that were drawn. `keep.py` keeps a
server running, and `connect.py` connects all of these for a run. This package may import
asynchronous/ and the folders below it. It does not import vLLM or SGLang.
"""
