"""An engine of others, such as vLLM, draws completions in the place of the sampler.

`groups.py` is a `GroupSampler`: requests in, rows out. `servers.py` shares rows among the servers
and knows which of them are there. `vllm.py` is what a server of vLLM is asked, over `client.py`.
`weights.py` writes the weights into folders, and `proof.py` finds out whether a server has them.
`drawn.py` records what was drawn. `command.py` is the command line of a server, `keep.py` keeps one
running, and `connect.py` puts the parts together for a run. It may import asynchronous/ and what
lies below it. Nothing of the engine is imported.
"""
