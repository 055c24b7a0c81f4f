"""Writes the tables of algorithm.md and from_verl.md that come from data: python docs/tables.py.

Each lies between marks. `<!-- table: algo NAME NAME -->` names settings of the section `algo`, and
`<!-- table: verl TITLE -->` a part of verl_keys.json. A row there has verl's keys with their
defaults, our keys, and a note. Our defaults come from the code. `???` says that verl's config lacks
the key, and a script of verl adds it.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import json
from pathlib import Path
import re
from typing import Any

from grpo_jax.algo.settings import Algo
from grpo_jax.config import Config

HERE = Path(__file__).parent
PAGES = (HERE / "algorithm.md", HERE / "from_verl.md")
MARKS = re.compile(r"(<!-- table: (\w+) (.*?) -->\n).*?(<!-- end of the table -->)", re.DOTALL)
# 'choices', names_with_lines, and section.keys
_CODE = r"'(\w+)'|\b((?:\w+\.)?[a-z0-9]+(?:_[a-z0-9]+)+|[a-z]+\.[a-z]+)\b"
ABSENT = "???"
LONGEST = 40  # characters of a default that is shown
# Sections of verl with the same keys, which are written as one.
TWINS = (("actor_rollout_ref.", ("actor", "ref")), ("", ("reward", "reward_model")))


def with_tables(page: str) -> str:
  """A page with the tables of today between its marks."""

  def table(found: re.Match[str]) -> str:
    start, kind, names, end = found.groups()
    rows = verl_parts()[names] if kind == "verl" else names.split()
    lines = verl_table(rows) if kind == "verl" else settings_table(rows, page)
    return "\n".join([start, *lines, "", end])

  return MARKS.sub(table, page)


def settings_table(names: list[str], page: str) -> Iterator[str]:
  """The lines of a table of settings. The page has tables for the choices of some of them."""
  yield "| key | default | meaning |\n|---|---|---|"
  declared = {field.name: field.metadata["setting"] for field in dataclasses.fields(Algo)}
  for name in names:
    one, key = declared[name], f"`algo.{name}`"
    words = re.sub(_CODE, r"`\1\2`", one.meaning)
    if re.search(rf"\| {key} \| \w", page):
      words += ": a name of the table below"
    elif not all(f"`{choice}`" in words for choice in one.range.choices):
      words += f". One of {', '.join(f'`{choice}`' for choice in one.range.choices)}"
    default = json.dumps(one.default) if isinstance(one.default, str) else repr(one.default)
    yield f"| {key} | `{default}` | {words} |"


def verl_parts() -> dict[str, list[dict[str, Any]]]:
  """The rows of verl_keys.json, by the title of their part."""
  return {part["title"]: part["rows"] for part in json.loads((HERE / "verl_keys.json").read_text())}


def verl_table(rows: list[dict[str, Any]]) -> Iterator[str]:
  """The lines of a table of verl's keys, and of the list of those that have no counterpart."""
  yield "| verl | here | notes |\n|---|---|---|"
  for row in rows:
    if row["here"]:
      yield f"| {_theirs(row['verl'])} | {', '.join(map(_ours, row['here']))} | {row['note']} |"
  without = [row for row in rows if not row["here"]]
  if without:
    yield "\nNot here:\n"
  for row in without:
    reason = f": {row['note']}" if row["note"] else ""
    yield f"* {_theirs(dict.fromkeys(row['verl'], ABSENT))}{reason}"


def _ours(key: str) -> str:
  """A key with its default, unless that is long. A flag such as --workdir stands for itself."""
  if key.startswith("--"):
    return f"`{key}`"
  value: Any = Config()
  for name in key.split("."):
    value = getattr(value, name)
  return f"`{key}={value!r}`" if len(repr(value)) <= LONGEST else f"`{key}`"


def _theirs(defaults: Mapping[str, Any]) -> str:
  """verl's keys with their defaults, where those of one section are written as section.{a, b}."""
  found: dict[str, list[str]] = {}
  for key, default in _joined(defaults).items():
    section, _, name = key.rpartition(".")
    value = "null" if default is None else default
    found.setdefault(section, []).append(name if default == ABSENT else f"{name}={value}")
  words = []
  for section, names in found.items():
    of_section = names[0] if len(names) == 1 else f"{{{', '.join(names)}}}"
    words.append(f"`{section}.{of_section}`" if section else f"`{of_section}`")
  return ", ".join(words)


def _joined(defaults: Mapping[str, Any]) -> dict[str, Any]:
  """Keys of twin sections with equal defaults as one key, such as a.{actor,ref}.b."""
  joined = dict(defaults)
  for before, (first, second) in TWINS:
    for key in defaults:
      name = key.removeprefix(f"{before}{first}.")
      twin, both = f"{before}{second}.{name}", f"{before}{{{first},{second}}}.{name}"
      if name != key and twin in joined and joined[twin] == joined[key]:
        del joined[twin]
        joined = {both if one == key else one: value for one, value in joined.items()}
  return joined


if __name__ == "__main__":
  for path in PAGES:
    path.write_text(with_tables(path.read_text()))
