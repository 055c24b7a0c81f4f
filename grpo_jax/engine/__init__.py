"""An external engine, such as vLLM, draws completions in place of the sampler.

`groups.py` is a `GroupSampler`: requests in, rows out. `servers.py` shares rows among the servers
and knows which of them are there. `vllm.py` sends requests to a server of vLLM, over `client.py`.
`weights.py` writes the weights into folders, and `proof.py` finds out whether a server has them.
`drawn.py` records the rows that were drawn. `command.py` is the command line of a server, `keep.py`
keeps a server running, and `connect.py` puts the parts together for a run. It may import
asynchronous/ and the folders below it. It imports no module of the engine.
"""
