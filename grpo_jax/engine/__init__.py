"""An external engine, vLLM or SGLang, draws completions in place of the sampler.

`groups.py` is a `GroupSampler`: requests in, rows out. `servers.py` shares rows among the servers
and knows which of them are there. `vllm.py` and `sglang.py` send requests to a server, over
`client.py`, and write its command line. They share `server.py`, and `engines.py` lists them.
`weights.py` writes the weights into folders, and `proof.py` finds out whether a server has them.
`drawn.py` records the rows that were drawn. `keep.py` keeps a server running, and `connect.py` puts
the parts together for a run. It may import asynchronous/ and the folders below it. It imports no
module of the engine.
"""
