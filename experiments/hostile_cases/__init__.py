"""Hostile inputs as rows, a module for each topic."""

from hostile_cases import (
  adapters,
  config_files,
  data,
  environments,
  flags,
  models,
  rewards,
  schedules,
  surroundings,
  texts,
  values,
  workdirs,
)
from hostile_cases.case import Case

TOPICS = (
  flags,
  values,
  config_files,
  data,
  environments,
  models,
  texts,
  adapters,
  rewards,
  schedules,
  workdirs,
  surroundings,
)
ALL: list[Case] = [case for topic in TOPICS for case in topic.CASES]

_names = [case.name for case in ALL]
_twice = sorted({name for name in _names if _names.count(name) > 1})
assert not _twice, f"two cases have the same name: {_twice}"
