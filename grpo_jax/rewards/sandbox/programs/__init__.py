"""Programs that run in a sandbox, with the standard library alone.

Their folder is on the path there. Nothing else imports them.
"""
