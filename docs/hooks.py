"""Puts files outside docs/ into the site, at their own paths, so that relative links reach them."""

from pathlib import Path
import re
import subprocess

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

FILES = (
  "CHANGELOG.md",
  "colabs/*.ipynb",
  "configs/**/*.py",
  "experiments/*.*",
  "experiments/log/*.md",
  "grpo_jax/**/*.py",
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
  root = Path(config.docs_dir).parent
  for path in sorted(path for pattern in FILES for path in root.glob(pattern)):
    name = path.relative_to(root).as_posix()
    target = f"{name.removesuffix('.md')}/index.html" if path.suffix == ".md" else name
    file = File(f"../{name}", config.docs_dir, config.site_dir, True, dest_uri=target)
    file.inclusion = InclusionLevel.NOT_IN_NAV
    files.append(file)
  return files


def on_config(config: MkDocsConfig) -> MkDocsConfig:
  """The site links to the repository that its checkout was cloned from."""
  command = ["git", "remote", "get-url", "origin"]
  try:
    done = subprocess.run(command, cwd=config.docs_dir, capture_output=True, text=True)
  except FileNotFoundError:  # there is no git here
    return config
  address = web_address(done.stdout.strip())
  if address and not config.repo_url:
    config.repo_url = address
    config.repo_name = "/".join(address.split("/")[-2:])
  return config


def web_address(remote: str) -> str:
  """Where a browser finds a remote of git. "" if it is no address of the web."""
  found = re.fullmatch(
    r"(?:https://|ssh://git@|git@)([^/:@]+\.[^/:@]+)[/:](.+?)(?:\.git)?/?", remote
  )
  return f"https://{found[1]}/{found[2]}" if found else ""


def on_page_markdown(markdown: str, **kwargs: object) -> str:
  """The README is for the repository alone: a link to it becomes its text."""
  return re.sub(r"\[(.+?)\]\(\.\./README\.md[^)]*\)", r"\1", markdown)
