"""Serves a run from outside: it is launched, planned, shown and ported here. No run needs it.

`launchers/` start runs on clusters, `planning/` says what a run needs, `reporting/` makes the page
of runs and compares them, and `trl.py` reads the configs of Hugging Face's TRL. Files may import
what a run is made of, and nothing of a run imports them.
"""
