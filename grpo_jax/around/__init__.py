"""Commands around runs: launching, planning, reporting and porting. No run needs this package.

`launchers/` starts runs on clusters, `planning/` computes what a run needs, `reporting/` makes the
page of runs and compares them, and `trl.py` reads the configs of Hugging Face's TRL. This package
may import the code of runs, and the code of runs never imports it.
"""
