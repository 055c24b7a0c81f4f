"""A page that shows runs: their settings, curves and completions."""
