"""The folder of a run: rows, checkpoints, locks, and their copy in a bucket.

It may import parallel/, config and the packages below them. It knows neither models nor rewards.
"""
