"""The model card of an export, and its upload."""

from pathlib import Path
import re

import huggingface_hub
from huggingface_hub import ModelCard
import pytest

import grpo_jax
from grpo_jax.algo.presets import PAPERS, PRESETS, closest, preset
from grpo_jax.config import Config
from grpo_jax.evaluation.model_card import Base, metadata, model_card, read_base
from grpo_jax.model.huggingface import hub
from grpo_jax.settings import ConfigError, RunFailed
from tests.small_qwen import make_checkpoint, problems
from tests.small_run import small_config

ROOT = Path(__file__).parents[1]
BASE = """---
license: other
license_name: tiny-license
license_link: https://example.org/license
language: [en]
---

# A tiny model | with a card
"""
ROWS = [
  {"step": 3, "reward": 0.25, "eval/accuracy": 0.5, "eval/accuracy_low": 0.4},
  {"step": 4, "reward": 0.5, "rewards/strict/mean": 0.5, "kl": None, "time/step": 3.0},
]
ROWS[0] |= {"eval/accuracy_high": 0.6, "eval/math500/accuracy": 0.125, "eval/mean_length": 21.5}


def card_of(kind="model", rows=ROWS, base=None, step=4, **changes):
  keys = {key.replace("__", "."): value for key, value in changes.items()}
  config = Config().replace({"model.path": "someone/tiny-1.5B@main", "warm_start.steps": 1, **keys})
  base = Base(BASE, {"license": "other", "license_name": "tiny"}) if base is None else base
  return ModelCard(model_card("sums", config, step, rows, base, kind))


def test_huggingface_hub_reads_its_metadata():
  card = card_of()
  assert card.data.base_model == "someone/tiny-1.5B" and "grpo" in card.data.tags
  assert (card.data.license, card.data.license_name) == ("other", "tiny")
  assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
  found = {(x.dataset_name, x.metric_type, x.metric_value) for x in card.data.eval_results}
  assert found == {("arithmetic", "accuracy", 0.5), ("math500", "accuracy", 0.125)}
  assert card_of("adapter").data.library_name == "peft"
  assert card_of("images").data.pipeline_tag == "image-text-to-text"


def test_an_interval_of_a_task_is_no_accuracy():
  row = {"step": 3, "eval/accuracy": 0.5}
  row |= {"eval/accuracy/sums": 0.5, "eval/accuracy/sums_low": 0.4, "eval/accuracy/sums_high": 0.6}
  found = card_of(rows=[row]).data.eval_results
  assert [x.dataset_name for x in found] == ["arithmetic", "sums"]


def test_it_says_what_the_model_is():
  text = card_of(
    data__path="/home/somebody/sums", reward__functions=("/home/me/f.py:pay(x=1)",)
  ).text
  for line in (
    "[someone/tiny-1.5B](https://huggingface.co/someone/tiny-1.5B) after 1 steps of a warm start"
    " and 3 steps of GRPO.",
    "| data | `arithmetic`, `sums` |",
    "| rewards | `f.py:pay` |",
    "| algorithm | GRPO, DeepSeekMath ([arXiv:2402.03300](https://arxiv.org/abs/2402.03300)) |",
    "## Evaluation after step 3",
    "| accuracy | 50.0% | 40.0% to 60.0% |",
    "| mean_length | 21.5 |  |",
    "## Metrics of step 4",
    "| reward | 0.5 |",
    "| kl | - |",
    "AutoModelForCausalLM",
    "That of the base model: tiny.",
    "[README_base.md](README_base.md)",
  ):
    assert line in text, line
  assert "/home" not in text and "time/step" not in text


def test_a_model_before_training_has_no_numbers_and_one_of_random_weights_no_licence():
  text = card_of(rows=[], step=0, base=Base(), model__path="").content
  assert "a model of random weights before training." in text
  parts = ("## Training", "## Evaluation", "## Metrics", "Licence", "- grpo\n")
  assert not [part for part in parts if part in text]
  assert "Look at the base model" in card_of(base=Base()).text


def test_settings_cannot_break_the_table():
  prompt = "a | b\n`{question}`"
  (row,) = re.findall(r"^\| prompts \|.*$", card_of(data__prompt=prompt).text, re.M)
  assert row == r"| prompts | `` a \| b\n`{question}` `` |"


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_is_found_by_its_settings(name):
  assert closest(preset(name)) == name


def test_other_settings_are_those_of_the_closest_preset():
  assert closest(Config().algo) == "grpo"
  dapo = Config().replace({f"algo.{k}": v for k, v in PRESETS["dapo"].items()})
  assert closest(dapo.replace({"algo.kl_coef": 0.01}).algo) == "dapo"


@pytest.mark.parametrize("name", PRESETS)
def test_a_number_makes_no_other_method(name):
  others = {"algo.minibatches": 3, "algo.clip_low": 0.123, "algo.kl_coef": 0.01}
  settings = {f"algo.{key}": value for key, value in PRESETS[name].items()}
  assert closest(Config().replace(settings | others).algo) == name


def test_variants_of_no_paper_are_named_and_are_not_grpo():
  card = card_of(algo__surrogate="sapo", algo__advantage="opo")
  assert (
    "| algorithm | advantage `opo`, ratio `token`, surrogate `sapo`, aggregation `sequence_mean`,"
    " correction `none` |"
  ) in card.text
  assert "and 3 steps of reinforcement learning." in card.text and "arXiv" not in card.text
  assert card.data.tags == ["grpo_jax", "reinforcement-learning"]
  assert (
    "and 3 steps of OPO." in card_of(algo__advantage="opo", algo__aggregation="token_mean").text
  )
  assert card_of(step=1).data.tags == ["grpo_jax"]  # a warm start alone
  unbounded = Config().replace({"algo.surrogate": "unclipped", "algo.aggregation": "token_mean"})
  assert closest(unbounded.algo) == ""


@pytest.mark.parametrize(
  ("path", "name"),
  [
    ("/home/me/sums", "sums"),
    ("~/me/sums", "sums"),
    ("./me/sums", "sums"),
    ("../me/sums", "sums"),
    ("me/../you/sums", "sums"),
    ("here/sums", "sums"),
    ("owner/name", "owner/name"),
  ],
)
def test_it_names_no_folder_of_the_machine(tmp_path, monkeypatch, path, name):
  (tmp_path / "here/sums").mkdir(parents=True)
  (tmp_path / "here/f.py").touch()
  monkeypatch.chdir(tmp_path)
  text = card_of(
    data__path=path, reward__functions=("here/f.py:pay(x=1)", "~/me/f.py:hold"), base=Base()
  ).text
  assert f"| data | `arithmetic`, `{name}` |" in text
  assert "| rewards | `f.py:pay`, `f.py:hold` |" in text
  if path != name:
    assert f"| base model | `{name}` |" in card_of(model__path=path).text


def test_the_papers_are_those_of_the_page():
  table = (ROOT / "docs/algorithm.md").read_text().split("| preset | paper |")[1].split("\n\n")[0]
  rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.M))
  assert rows.keys() == PAPERS.keys() == PRESETS.keys()
  for name, text in rows.items():
    method, number = PAPERS[name]
    assert text.startswith(method.split(",")[0]), name
    assert number in text or "in the same paper" in text, name


@pytest.mark.parametrize(
  ("card", "config", "license"),
  [
    (BASE, '{"license": "mit"}', ["other", "tiny-license", "https://example.org/license"]),
    ("---\nlicense: mit\n---\n", "{}", ["mit"]),
    ("---\r\nlicense: mit\r\n---\r\ntext", "{}", ["mit"]),
    ("no metadata", '{"license": "apache-2.0"}', ["apache-2.0"]),
    ("---\nlicense: [\n---\n", "{}", []),
    ("---\njust a text\n---\n", "{}", []),
    ("---\ndate: 2024-02-30\n---\n", "{}", []),
    (f"---\na: {'[' * 5000}\n---\n", "{}", []),
    ("no metadata", '{"license_link": "https://x/y"}', ["https://x/y"]),
    (None, "{}", []),
  ],
)
def test_the_licence_is_that_of_the_folder(tmp_path, card, config, license):
  (tmp_path / "config.json").write_text(config)
  if card is not None:
    (tmp_path / "README.md").write_bytes(card.encode())
  base = read_base(tmp_path)
  assert [*base.license.values()] == license
  assert base.card.split() == (card or "").split()
  assert "## Licence" in card_of(base=base).text


def test_what_is_no_metadata_is_none():
  assert metadata("") == metadata("# title\n---\na: 1\n---\n") == {}
  assert metadata("---\na: 1\n---") == {"a": 1}


@pytest.mark.slow
def test_an_export_has_a_card_and_keeps_that_of_its_base(tmp_path):
  make_checkpoint(tmp_path / "base", problems(4))
  (tmp_path / "base/README.md").write_text(BASE)
  config = small_config().replace({"model.path": str(tmp_path / "base")})
  out = grpo_jax.load_policy(config).export(tmp_path / "exported")
  card = ModelCard.load(out / "README.md")
  assert card.text.startswith("\n# base\n") and "`base` before training." in card.text
  assert card.data.license_name == "tiny-license" and card.data.base_model is None
  assert (out / "README_base.md").read_text() == BASE
  again = grpo_jax.load_policy(config.replace({"model.path": str(out)})).export(tmp_path / "again")
  assert ModelCard.load(again / "README.md").data.license_name == "tiny-license"


@pytest.fixture
def hub_of_others(monkeypatch):
  """A fake HfApi, with what was called and the files that the repository has."""

  class Api:
    calls: list = []
    files: set = set()
    error: Exception | None = None

    def create_repo(self, name, **options):
      if Api.error:
        raise Api.error
      Api.calls.append(("create", name, options))
      return f"https://huggingface.co/{name}"

    def list_repo_files(self, name):
      return sorted(Api.files)

    def upload_folder(self, **options):
      Api.calls.append(("upload", options))

  Api.calls, Api.files, Api.error = [], set(), None
  monkeypatch.setattr(huggingface_hub, "HfApi", Api)
  monkeypatch.setattr(huggingface_hub, "get_token", lambda: "token")
  return Api


def test_a_push_uploads_the_folder_to_a_private_repository(tmp_path, hub_of_others):
  (tmp_path / "model.safetensors").touch()
  lines = hub.push(tmp_path, "me/sums")
  assert lines == ["uploaded to https://huggingface.co/me/sums, which is private if it is new"]
  create, (_, upload) = hub_of_others.calls
  assert create == ("create", "me/sums", {"private": True, "exist_ok": True})
  assert (upload["repo_id"], upload["folder_path"]) == ("me/sums", tmp_path)
  assert upload["delete_patterns"] is None and upload["ignore_patterns"] is None


def test_a_push_of_a_model_removes_what_would_be_read_instead_and_nothing_else(
  tmp_path, hub_of_others
):
  """The library matches its patterns with whole paths."""
  (tmp_path / "model.safetensors").touch()
  outdated = {
    "adapter_config.json",
    "adapter_model.safetensors",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
  }
  kept = {
    "model.safetensors",  # it is uploaded again
    "model_old.safetensors",
    "models/mine.safetensors",
    "older/adapter_config.json",
    "older/model.safetensors",
    "config.json",
  }
  hub_of_others.files = outdated | kept
  hub.push(tmp_path, "me/sums")
  _, (_, upload) = hub_of_others.calls
  patterns = upload["delete_patterns"]
  gone = huggingface_hub.utils.filter_repo_objects(outdated | kept, allow_patterns=patterns)
  assert {*gone} == outdated


def test_a_push_keeps_a_card_that_is_there_and_adapters_keep_the_model(tmp_path, hub_of_others):
  hub_of_others.files = {"README.md", "model.safetensors", "adapter_model.safetensors"}
  (tmp_path / "adapter_config.json").touch()
  lines = hub.push(tmp_path, "me/sums")
  assert lines[1] == f"me/sums has a README.md, which stays as it is; the new one is in {tmp_path}"
  _, (_, upload) = hub_of_others.calls
  assert upload["ignore_patterns"] == ["README.md"] and upload["delete_patterns"] is None


def test_a_push_that_fails_is_one_line_and_the_folder_stays(tmp_path, hub_of_others, monkeypatch):
  later = f"hf upload me/sums {tmp_path} --private does that later"
  hub_of_others.error = OSError("no\nnetwork")
  with pytest.raises(RunFailed) as error:
    hub.push(tmp_path, "me/sums")
  assert str(error.value) == (
    f"{tmp_path} is written, and not uploaded to me/sums (OSError: no network); {later}"
  )
  monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
  with pytest.raises(RunFailed, match=r"because there is no token: run hf auth login") as error:
    hub.push(tmp_path, "me/sums")
  assert str(error.value).endswith(later) and tmp_path.is_dir()


def test_the_command_of_a_push_that_fails_keeps_and_removes_what_the_push_would(
  tmp_path, hub_of_others, monkeypatch
):
  def fail(self, **options):
    text = "Client error '401 Unauthorized' for url 'https://huggingface.co/api/models/me/sums'"
    page = "For more information check: https://developer.mozilla.org/docs/Web/HTTP/Status/401"
    raise OSError(f"{text}\n{page} (Request ID: {'1' * 60})\n\nInvalid username or password.")

  folder = tmp_path / "my model"
  folder.mkdir()
  (folder / "model.safetensors").touch()
  hub_of_others.files = {"README.md", "model.safetensors", "adapter_config.json", "notes.md"}
  monkeypatch.setattr(hub_of_others, "upload_folder", fail)
  with pytest.raises(RunFailed, match=r"Invalid username or password\.\);") as error:
    hub.push(folder, "me/sums")
  options = "--private --exclude README.md --delete adapter_config.json"
  assert str(error.value).endswith(f"; hf upload me/sums '{folder}' {options} does that later")
  assert "mozilla" not in str(error.value)


@pytest.mark.parametrize(
  "name", ["sums", "me/sums@main", "me/sums/more", "https://x/y", "me/a.json"]
)
def test_a_name_that_is_no_repository_is_refused(name):
  with pytest.raises(ConfigError, match="^flag --push=.*: it must be OWNER/NAME"):
    hub.check_repository(name, "flag --push")
  hub.check_repository("me/sums-1.5B", "flag --push")
