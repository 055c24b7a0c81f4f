"""Reward models score as transformers does: tokens, texts and steps, and in whole runs.

tests/golden/make_rewards.py made the expected scores. `pytest -s -n 0` prints the largest
differences.
"""

import dataclasses
import json
from pathlib import Path
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import default
from grpo_jax import model
from grpo_jax.batches.collect import Collector
from grpo_jax.config import from_dict
from grpo_jax.data.tokenizers import tokenizer
from grpo_jax.run.run import Run
from grpo_jax.scoring import reward_model
from grpo_jax.scoring.scorers import Scorers
from grpo_jax.settings import ConfigError
from grpo_jax.storage.reading import read_metrics
from grpo_jax.timing import Clock
from grpo_jax.train import train

GOLDEN = Path(__file__).parent / "golden" / "rewards"
FOLDERS = sorted(GOLDEN.iterdir())
WITH_TEXTS = [folder for folder in FOLDERS if (folder / "texts.json").exists()]
BOUND = 1e-4


def folder_name(folder):
  return folder.name


def config(functions, weights=None, preset="grpo", mesh=(8, 1, 1), **sections):
  """A small policy of random weights, rewarded by `functions`."""
  c = default.get_config(preset)
  c.steps = 2
  c.model.update(embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=32)
  c.batch.update(prompts=8, group_size=3)
  c.data.max_prompt_tokens, c.sampling.max_tokens = 12, 9
  c.optimizer.learning_rate = 1e-2
  c.reward.functions = tuple(map(str, functions))
  c.reward.weights = weights or (1.0,) * len(functions)
  c.reward.batch = 16
  c.mesh.update(dict(zip(("data", "fsdp", "tensor", "context"), mesh)))
  c.log.update(completions_every=1, tensorboard=False)
  for section, values in sections.items():
    c[section].update(values)
  return from_dict(c.to_dict())


def the_reward(folder, **sections):
  """The reward model in `folder`, as a run builds it."""
  (reward,) = functions_of(Run(config([folder], **sections)))
  return reward


def functions_of(run):
  """The reward functions that the run's scorer calls."""
  return Scorers(run).training._functions


# Tokens.


# Their layers are those of golden_model_test.py.
_SLOW = (
  "deepseek_v3",
  "gpt_oss",
  "phi3",
  "llama",
  "qwen3_5",
  "qwen3_next",
  "gemma2",
  "mistral",
  "qwen2_steps",
  "gemma3",
  "qwen2",
)


@pytest.mark.parametrize(
  "folder",
  [pytest.param(x, marks=pytest.mark.slow if x.name in _SLOW else ()) for x in FOLDERS],
  ids=folder_name,
)
def test_scores_of_tokens_are_those_of_transformers(folder):
  config, params = model.load(folder, labels=model.REWARD_HEADS)
  expected = np.load(folder / "expected.npz")
  tokens_BT, lengths_B = jnp.asarray(expected["tokens"]), expected["lengths"]
  positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)

  @jax.jit
  def score(params):
    hidden_BTD, _ = model.features(params, config, tokens_BT, positions_BT)
    return model.score(params, config, hidden_BTD)

  scores, wanted = np.asarray(score(params)), expected["scores"]
  if config.labels == 1:
    scores = scores[np.arange(len(lengths_B)), lengths_B - 1]
  else:
    valid_BT = np.arange(tokens_BT.shape[1]) < lengths_B[:, None]
    scores, wanted = scores[valid_BT], wanted[valid_BT]
    assert 0 < wanted.min() < 0.2 and 0.8 < wanted.max() < 1
  difference = np.abs(scores - wanted).max()
  print(f"{folder.name}: largest difference of {len(wanted)} scores {difference:.1e}")
  assert np.ptp(wanted) > 0.5 and difference <= BOUND


@pytest.mark.slow
@pytest.mark.parametrize(
  "folder",
  [
    GOLDEN / "gemma3",
    GOLDEN / "qwen2_steps",
  ],
  ids=folder_name,
)
def test_a_reward_model_is_saved_as_it_was_loaded(folder, tmp_path):
  config, params = model.load(folder, labels=model.REWARD_HEADS)
  model.save(tmp_path / "saved", config, params)
  architectures = [
    json.loads((where / "config.json").read_text())["architectures"]
    for where in (tmp_path / "saved", folder)
  ]
  assert architectures[0] == architectures[1]
  again, saved = model.load(tmp_path / "saved", labels=model.REWARD_HEADS)
  assert again == config and "head" not in saved
  # The scales of some norms are saved as w and used as 1 + w.
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2.4e-7), saved, params)


# Texts.


@pytest.mark.slow
@pytest.mark.parametrize("dtype, bound", [("float32", BOUND), ("bfloat16", 0.2)])
@pytest.mark.parametrize(
  "folder",
  WITH_TEXTS,
  ids=folder_name,
)
def test_scores_of_texts_are_those_of_transformers(folder, dtype, bound):
  """With its own tokenizer, on eight devices. There are eight texts, and a batch is sixteen."""
  expected = json.loads((folder / "texts.json").read_text())
  score = the_reward(
    folder,
    reward=dict(step_separator=expected["separator"] or "\n"),
    model=dict(dtype=dtype),
    mesh=(2, 2, 2),
  )
  found = score(completions=expected["completions"], prompts=expected["prompts"])
  assert score.__name__ == folder.name
  assert [[end for end, _ in steps] for steps in found] == [
    [end for end, _ in steps] for steps in expected["steps"]
  ]
  difference = max(
    abs(a - b)
    for ours, theirs in zip(found, expected["steps"])
    for (_, a), (_, b) in zip(ours, theirs)
  )
  print(f"{folder.name}, {dtype}: largest difference {difference:.1e}")
  assert difference <= bound


@pytest.mark.slow
@pytest.mark.parametrize(
  "mesh",
  [
    (2, 2, 2),
    *((8, 1, 1), (1, 8, 1), (1, 1, 8), (1, 1, 2, 4)),
  ],
  ids=str,
)
@pytest.mark.parametrize(
  "folder",
  [GOLDEN / "qwen2", GOLDEN / "llama_steps"],
  ids=folder_name,
)
def test_a_score_depends_on_its_text_alone(folder, mesh):
  """Not on order, batch, padding or mesh: 21 texts in batches of 16 or 8, in reverse."""
  expected = json.loads((folder / "texts.json").read_text())
  sections = dict(
    reward=dict(batch=8 if mesh[0] == 8 else 16, step_separator=expected["separator"] or "\n"),
    mesh=mesh,
  )
  many = {key: (expected[key] * 3)[20::-1] for key in ("completions", "prompts", "steps")}
  score = the_reward(folder, **sections)
  found = score(completions=many["completions"], prompts=many["prompts"])
  for ours, theirs in zip(found, many["steps"], strict=True):
    np.testing.assert_allclose(ours, theirs, atol=BOUND)


@pytest.mark.slow
def test_few_lengths_are_compiled():
  score = the_reward(GOLDEN / "qwen2")
  compute, lengths = score._scores, set()

  def record(params, tokens_BT):
    lengths.add(tokens_BT.shape[1])
    return compute(params, tokens_BT)

  score._scores = record
  for n in (1, 2, 3, 5, 8, 13, 20, 27, 31):
    score(completions=["1" * n] * n, prompts=["7+15="] * n)
  assert lengths == {8, 16, 32, 64}


@pytest.mark.slow
def test_a_text_longer_than_the_positions_is_not_scored():
  """64 positions: 2 tokens of a prompt and 62, or 63."""
  score = the_reward(GOLDEN / "qwen2")
  found = score(completions=["1" * 62, "1" * 63, "1"], prompts=["7="] * 3)
  assert [steps and steps[0][0] for steps in found] == [62, None, 1]


TOKENS = tokenizer.characters("abcd;\n ")


@pytest.mark.parametrize(
  "completion, separator, tokens, marks",
  [
    ("ab;cd", ";", "ab;cd;", [(3, 3), (5, 6)]),
    ("ab;cd;", ";", "ab;cd;", [(3, 3), (6, 6)]),
    (";ab; ;;c", ";", "ab;c;", [(4, 3), (8, 5)]),  # blank parts are no steps
    ("ab\n\ncd\n", "\n\n", "ab\n\ncd\n\n\n", [(4, 4), (7, 9)]),
    ("", ";", ";", [(1, 1)]),
    (";", ";", ";;", [(1, 2)]),
    (" ", ";", " ;", [(1, 2)]),
  ],
)
def test_where_steps_end_by_hand(completion, separator, tokens, marks):
  """Marks are the characters up to a step's end, and the place of its separator's last token.

  The prompt is `d`, the token at place 0.
  """
  (text,) = reward_model.stepwise(TOKENS, separator, ["d"], [completion])
  assert text == reward_model.Text(TOKENS.encode("d" + tokens), marks)


def test_the_token_that_begins_a_text_is_added_for_steps_only():
  begun = dataclasses.replace(TOKENS, special={"bos_token": "<eos>"})
  assert reward_model.stepwise(begun, ";", ["d"], ["a"])[0] == reward_model.Text(
    [1, *TOKENS.encode("da;")], [(1, 3)]
  )
  assert reward_model.whole_texts(begun, ";", ["d"], ["a"])[0] == reward_model.Text(
    TOKENS.encode("da"), [(1, 1)]
  )


def test_a_text_is_scored_at_its_last_token_that_is_not_padding():
  """As transformers does, although a template may end in the token that also pads."""
  padded = dataclasses.replace(TOKENS, pad_id=TOKENS.encode("b")[0])
  assert reward_model.whole_texts(padded, ";", ["d"], ["abb"])[0].marks == [(3, 1)]


@pytest.mark.slow
def test_a_model_without_a_template_is_refused_where_there_are_conversations(tmp_path):
  c = config([WITH_TEXTS[0]])
  chatty = Path(__file__).parent / "golden" / "tokenizers" / "qwen"
  c = dataclasses.replace(c, data=dataclasses.replace(c.data, chat=True, tokenizer=str(chatty)))
  with pytest.raises(
    ConfigError, match=f"^reward.functions: {WITH_TEXTS[0].name}: no chat template"
  ):
    functions_of(Run(c))


def test_a_conversation_goes_through_the_models_own_template():
  """One that writes what begins a text itself, which is then not there twice."""
  llama = tokenizer.load(Path(__file__).parent / "golden" / "tokenizers" / "llama3")
  asked, answer = [{"role": "user", "content": "1+1?"}], {"role": "assistant", "content": "It is 2"}
  whole = reward_model.whole_texts(llama, "\n", [asked], ["It is 2"])[0]
  assert whole.ids == llama.encode(llama.render([*asked, answer], generation_prompt=False))
  assert whole.marks == [(7, len(whole.ids) - 2)]  # what ends a text there also pads
  steps = reward_model.stepwise(llama, "\n", [asked], ["It is\n2"])[0]
  opening = llama.encode(llama.render(asked))
  assert steps.ids == opening + llama.encode("It is") + llama.encode("\n") + llama.encode(
    "2"
  ) + llama.encode("\n")
  assert steps.ids.count(llama.encode(llama.special["bos_token"])[0]) == 1 and [
    end for end, _ in steps.marks
  ] == [6, 7]


# Whole runs.


def train_and_read(tmp_path, *args, **kwargs):
  """Returns the rows of metrics, and the rows of completions of each step."""
  workdir = tmp_path / "run"
  train(config(*args, **kwargs), workdir)
  files = sorted((workdir / "completions").iterdir())
  return read_metrics(workdir), [
    list(map(json.loads, file.read_text().splitlines())) for file in files
  ]


def expected_scores(folder, rows, separator=";"):
  """The scores of each completion, each computed from the text up to its token.

  It takes all rows at once, without a mesh.
  """
  config, params = model.load(folder, labels=model.REWARD_HEADS)
  encode, tokens_BT, places = tokenizer.load(folder).encode, np.zeros((len(rows), 64), np.int32), []
  for tokens_T, row in zip(tokens_BT, rows):
    parts = [row["completion"]]
    if config.labels == 2:
      steps = [part for part in row["completion"].split(separator) if part.strip()]
      parts = [step + separator for step in steps or [row["completion"]]]
    ids = encode(row["prompt"] + "".join(parts))
    tokens_T[: len(ids)] = ids
    # A token is a character.
    places.append(len(row["prompt"]) + np.cumsum([len(part) for part in parts]) - 1)
  positions_BT = np.broadcast_to(np.arange(64), tokens_BT.shape)

  @jax.jit
  def score(params):
    hidden_BTD, _ = model.features(params, config, tokens_BT, positions_BT)
    return model.score(params, config, hidden_BTD)

  scores = np.asarray(score(params))
  return [scores_T[where] for scores_T, where in zip(scores, places)]


@pytest.mark.slow
def test_a_run_learns_from_reward_models_and_a_function_on_any_mesh(tmp_path):
  """The rewards are those of an independent computation.

  Another mesh gives the same rewards of the first step.
  """
  models = ("qwen2", "qwen2_steps")
  functions = [GOLDEN / "qwen2", "strict", GOLDEN / "qwen2_steps"], (2.0, 1.0, -3.0)
  separator = dict(step_separator=";")
  metrics, steps = train_and_read(tmp_path, *functions, mesh=(2, 2, 2), reward=separator)
  assert [row["step"] for row in metrics] == [1, 2] and len(steps) == 2
  for measured, rows in zip(metrics, steps):
    expected = {
      name: np.array([s.mean() for s in expected_scores(GOLDEN / name, rows)]) for name in models
    }
    for name in models:
      found = [row[f"rewards/{name}"] for row in rows]
      np.testing.assert_allclose(found, expected[name], atol=BOUND)
      assert measured[f"rewards/{name}/mean"] == pytest.approx(expected[name].mean(), abs=BOUND)
      assert measured[f"rewards/{name}/unscored"] == 0
    strict = np.array([row["rewards/strict"] for row in rows])
    total = 2 * expected["qwen2"] + strict - 3 * expected["qwen2_steps"]
    np.testing.assert_allclose([row["reward"] for row in rows], total, atol=5 * BOUND)
    assert measured["advantage/std"] > 0.1 and measured["grad_norm"] > 0
  run = Run(config(*functions, mesh=(8, 1, 1), reward=separator))
  collector = Collector(run, Scorers(run))
  host = collector.initial_host_state()
  collected = collector(run.initial_params(), 0, host, Clock())
  for ours, theirs in zip(collected.rows, steps[0], strict=True):
    for key, value in ours.items():
      assert value == pytest.approx(theirs[key], abs=5 * BOUND), key


@pytest.mark.slow
def test_steps_of_a_process_reward_model_reach_the_tokens(tmp_path):
  """The advantage of the first token is the sum over all steps of the completion.

  A step counts with its score, less the mean of all steps of the group, divided by their deviation.
  """
  (measured, _), (rows, _) = train_and_read(
    tmp_path, [GOLDEN / "qwen2_steps"], preset="process", reward=dict(step_separator=";")
  )
  scores = expected_scores(GOLDEN / "qwen2_steps", rows)
  for group in (slice(i, i + 3) for i in range(0, len(rows), 3)):
    values = np.concatenate(scores[group])
    first = [((s - values.mean()) / (values.std(ddof=1) + 1e-4)).sum() for s in scores[group]]
    found = [row["advantage"] for row in rows[group]]
    np.testing.assert_allclose(found, first, rtol=1e-2, atol=1e-2)
  assert max(map(len, scores)) > 1 and measured["advantage/std"] > 0.1


# What is refused.


@pytest.fixture
def copied(tmp_path):
  """make(folder of tests/golden, **fields) -> a copy with other fields in its config.json."""

  def make(folder, **fields):
    copy = shutil.copytree(GOLDEN.parent / folder, tmp_path / "model")
    values = json.loads((copy / "config.json").read_text()) | fields
    (copy / "config.json").write_text(
      json.dumps({key: value for key, value in values.items() if value is not ...})
    )
    return copy

  return make


@pytest.mark.parametrize(
  "folder, fields, words",
  [
    (
      "qwen2_tied",
      {},
      [
        "architectures is ['Qwen2ForCausalLM']",
        "choose a checkpoint of Qwen2ForSequenceClassification or Qwen2ForTokenClassification",
      ],
    ),
    (
      "rewards/qwen2",
      dict(architectures=...),
      ["architectures is None", "Qwen2ForSequenceClassification"],
    ),
    (
      "rewards/qwen2",
      dict(architectures=["Qwen2ForProcessRewardModel"]),
      ["architectures is ['Qwen2ForProcessRewardModel']"],
    ),
    (
      "rewards/gemma3",
      dict(architectures=["Gemma3ForCausalLM"]),
      ["a checkpoint of Gemma3TextForSequenceClassification"],
    ),
    (
      "rewards/qwen2",
      dict(id2label={"0": "a", "1": "b", "2": "c"}),
      ["id2label has 3 labels", "a Qwen2ForSequenceClassification with 1"],
    ),
    ("rewards/qwen2", dict(id2label=..., label2id=...), ["id2label has 2 labels", "with 1"]),
    (
      "rewards/qwen2_steps",
      dict(id2label={"0": "a"}),
      ["id2label has 1 labels", "a Qwen2ForTokenClassification with 2"],
    ),
    (
      "rewards/qwen2_steps",
      dict(token_classification_bias=False),
      ["token_classification_bias is False", "with True"],
    ),
    (
      "families/qwen2_window",
      dict(architectures=["Qwen2ForSequenceClassification"], id2label={"0": "a"}),
      ["has no tensor score.weight", "correct its config.json"],
    ),
    (
      "rewards/qwen2_steps",
      dict(architectures=["Qwen2ForSequenceClassification"], id2label={"0": "a"}),
      ["tensor score.weight is (2, 16), by config.json it should be (1, 16)"],
    ),
    ("rewards/qwen3", {}, ["reward.functions", "holds neither tokenizer.json nor tokenizer.model"]),
    (
      "rewards/qwen2",
      dict(vocab_size=10),
      ["tensor model.embed_tokens.weight is (48, 16), by config.json it should be (10, 16)"],
    ),
  ],
)
def test_a_folder_that_is_no_reward_model_is_refused(copied, folder, fields, words):
  folder = copied(folder, **fields)
  if "score.weight" in words[0] or "tensor" in words[0]:
    tokenizer.load(GOLDEN / "qwen2").save(folder)
  elif words[0] != "reward.functions":
    # Errors of the model come before those of the tokenizer.
    (folder / "tokenizer.json").unlink(missing_ok=True)
  with pytest.raises(ConfigError) as error:
    the_reward(folder)
  message = str(error.value)
  assert "\n" not in message and str(folder) in message
  assert all(word in message for word in words), message


@pytest.mark.slow
def test_a_name_that_occurs_twice_is_refused():
  run = Run(config([GOLDEN / "qwen2", str(GOLDEN / "qwen2") + "/"]))
  with pytest.raises(ConfigError, match="two functions have the same name"):
    functions_of(run)


def test_a_reward_model_as_policy_is_refused():
  words = "architectures is .*Classification.*choose a checkpoint of Qwen2ForCausalLM$"
  with pytest.raises(ConfigError, match=words):
    Run(config(["strict"], model=dict(path=str(GOLDEN / "qwen2"))))
