"""Problems of the package reasoning_gym: how they are drawn, refused and scored."""

import collections
import dataclasses
import json
import os
from pathlib import Path
import pickle
import random
import subprocess
import sys
import threading

import numpy as np
import pytest
from small_run import small_config, with_section

from experiments import reasoning_gym_rates
import grpo_jax
from grpo_jax import calls, rewards
from grpo_jax.config import Data
from grpo_jax.console.show_data import drawn
from grpo_jax.console.show_gym import knob_lines, task_lines
from grpo_jax.data.prompts import PromptSet
from grpo_jax.data.tasks import reasoning_gym as problems
from grpo_jax.data.tasks import tasks
from grpo_jax.data.tasks.mixture import mixture_of, sources_of
from grpo_jax.data.tokenizers import tokenizer
from grpo_jax.problems import gym
from grpo_jax.recipes import with_absolute_paths
from grpo_jax.rewards.functions.reasoning_gym import answer_of, readings
from grpo_jax.settings import ConfigError

pytest.importorskip("reasoning_gym", reason="pip install -e '.[reasoning-gym]'")

ROOT = Path(__file__).parents[1]
QWEN = tokenizer.load(ROOT / "tests/golden/tokenizers/qwen")
# Tasks that have draws of sets or of the generators of the process in them.
SHARED = ("isomorphic_strings", "ransom_note", "polynomial_multiplication", "list_functions")
# No answer is known to these, only a verifier.
WITHOUT_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
# Making one problem can take seconds.
SLOW = {
  "futoshiki",
  "intermediate_integration",
  "knight_swap",
  "puzzle24",
  "quantum_lock",
  "zebra_puzzles",
}


def of(call, split="train"):
  return problems.Problems(gym.parse(call, "data.path"), split)


def score(completions, examples, **options):
  given = ", ".join(f"{option}={value!r}" for option, value in options.items())
  name = f"reasoning_gym({given})" if given else "reasoning_gym"
  function = rewards.resolve(name, "reward.functions", lambda name: False)
  columns = {name: [example[name] for example in examples] for name in ("verifier", "entry")}
  return function(completions=completions, **columns)


def data(path, **values):
  return Data(task="reasoning_gym", path=path, max_prompt_tokens=512, **values)


# Problems.


def test_a_problem_depends_only_on_its_number():
  one, other = of("chain_sum(min_terms=2, max_terms=2)"), of("chain_sum(min_terms=2, max_terms=2)")
  random.seed(1)
  np.random.seed(1)
  forward = one[:20]
  random.seed(2)
  backward = [other[i] for i in reversed(range(20))]
  assert forward == backward[::-1]
  assert one[-1] == one[len(one) - 1] and len(one) == 60_000
  with pytest.raises(IndexError, match="train has 60000 examples, no number 60000"):
    one[60_000]
  first, second = forward[0]["question"], forward[1]["question"]
  assert first.startswith("State the final answer") and first != second
  assert forward[0]["solution"] == f"<answer>{forward[0]['answer']}</answer>"
  assert forward[0]["verifier"] == "chain_sum(min_terms=2, max_terms=2)"


def test_problems_do_not_depend_on_the_generators_of_the_process():
  found = []
  for seed in (1, 2):
    random.seed(seed)
    found.append([problem["question"] for problem in of("list_functions")[:60]])
  assert found[0] == found[1]


@pytest.mark.slow
def test_problems_are_those_of_other_processes():
  """A process has hashes of its own, and so another order of its sets."""
  code = (
    "import json, sys; from grpo_jax.problems import gym;"
    " from grpo_jax.data.tasks.reasoning_gym import Problems;"
    " print(json.dumps([[Problems(gym.parse(name, 'k'), split)[i]['question']"
    " for i in (5, 0)] for name in sys.argv[1:] for split in ('train', 'test')]))"
  )
  found = []
  for seed in "12":
    environment = os.environ | {"PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", code, *SHARED]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
    found.append(json.loads(done.stdout))
  assert found[0] == found[1] and len(found[0]) == 2 * len(SHARED)


def test_drawing_leaves_the_generators_of_the_process_alone():
  random.seed(3)
  np.random.seed(3)
  expected = random.random(), np.random.random()
  random.seed(3)
  np.random.seed(3)
  for name in ("pool_matrix", "list_functions"):
    of(name)[:5]
  assert (random.random(), np.random.random()) == expected


@pytest.mark.parametrize("name", ["coin_flip", "string_splitting", "chain_sum"])
def test_training_and_test_share_no_problem(name):
  """The first two have so few problems that seeds that differ often make the same one."""
  train, test = of(name), of(name, "test")
  trained = {problem["question"] for problem in train[:800]}
  tested = {problem["question"] for problem in test[:100]}
  assert not trained & tested
  assert {problems.split_of(question) for question in trained} == {"train"}
  assert len(tested) > (90 if name == "chain_sum" else 10)


def test_a_seed_for_which_a_task_fails_is_passed_over(monkeypatch):
  opened, made = gym.open_dataset, collections.Counter()

  class Failing:
    """Fails for every other seed, and after that for all."""

    def __init__(self, dataset):
      self.dataset, self.failed = dataset, False

    def __getitem__(self, index):
      self.failed |= index % 2 == 0
      if self.failed:
        raise RuntimeError(f"no problem {index}")
      made[index] += 1
      return self.dataset[index]

  monkeypatch.setattr(gym, "open_dataset", lambda *args: Failing(opened(*args)))
  assert len({problem["question"] for problem in of("spell_backward")[:5]}) > 1 and made
  monkeypatch.setattr(Failing, "failed", True, raising=False)
  monkeypatch.setattr(Failing, "__init__", lambda self, dataset: None)
  with pytest.raises(ConfigError, match="spell_backward: there is no problem 0 for train: Runtime"):
    of("spell_backward")[0]


def test_a_task_with_too_few_problems_is_refused(monkeypatch):
  monkeypatch.setattr(problems, "split_of", lambda question: "train")
  with pytest.raises(ConfigError, match="no problem 0 for test: each of 400 belongs to the other"):
    of("chain_sum", "test")[0]


# What data.path names.


@pytest.mark.parametrize(
  "path, words",
  [
    ("", "data.path is empty: .* needs names of its tasks, such as chain_sum,gsm_symbolic"),
    ("chain_sun", "has no task 'chain_sun': did you mean chain_sum"),
    ("qqqqqqq", "has no task 'qqqqqqq'; python -m grpo_jax.data --list shows all"),
    ("chain_sum(min_term=2)", "chain_sum has no knob 'min_term': did you mean min_terms"),
    ("ab(zzz=1)", "ab has no knob 'zzz'; its knobs are length"),
    ("aiw(max_entities=2.5)", r"aiw\(max_entities=2.5\): it must be a whole number"),
    ("chain_sum(allow_negation=1)", "it must be True or False"),
    ("chain_sum(min_terms=9)", "reasoning_gym refuses it: max_terms must be >= min_terms"),
    ("gsm_symbolic(difficulty=7)", "refuses it: assert 1.0 <= self.difficulty"),
    ("chain_sum(seed=1)", "grpo_jax chooses the seed itself"),
    ("chain_sum(size=1)", "grpo_jax chooses the size itself"),
    ("chain_sum(2)", "write parameters as chain_sum.name=value"),
    ("composite", "composite of reasoning_gym is refused: it only mixes other tasks"),
    ("codeio", "codeio of reasoning_gym is refused: another process makes other problems"),
    ("chain_sum,ab,chain_sum(max_terms=3)", "two sources named chain_sum"),
    ("a b", "data.path: 'a b' is no task: write TASK"),
  ],
)
def test_what_cannot_be_used_is_one_line(path, words):
  with pytest.raises(ConfigError, match=words) as error:
    tasks.make_task(data(path))
  assert "\n" not in str(error.value)


def test_a_missing_package_is_one_line(monkeypatch):
  monkeypatch.setitem(sys.modules, "reasoning_gym", None)
  monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
  words = r"needs the package reasoning-gym: pip install -e '\.\[reasoning-gym\]'"
  with pytest.raises(ConfigError, match=words):
    tasks.make_task(data("chain_sum"))
  with pytest.raises(ConfigError, match=words):
    rewards.resolve("reasoning_gym", "reward.functions", lambda name: False)


def test_nothing_of_the_package_is_imported_before_it_is_needed():
  code = (
    "import sys; import grpo_jax.rewards, grpo_jax.data.tasks.tasks, grpo_jax.data.prompts;"
    " assert not {'reasoning_gym', 'sympy'} & set(sys.modules)"
  )
  subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_lists_of_calls_are_split_at_their_own_commas():
  assert calls.split_list(" a(x=1,y=[2, 3]), b ,c(z='),'),") == [
    "a(x=1,y=[2, 3])",
    "b",
    "c(z='),')",
  ]
  assert calls.split_list(r"a(x='\',b'),c") == [r"a(x='\',b')", "c"]
  assert calls.split_list(r"a(x='\\'),b") == [r"a(x='\\')", "b"]
  assert calls.split_list(" , ") == []


def test_a_folder_of_the_same_name_is_no_task(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "chain_sum").mkdir()
  source = "easy=reasoning_gym:chain_sum"
  for values in (dict(task="reasoning_gym", path="chain_sum"), dict(mixture=(source,))):
    config = with_section(small_config(), "data", **values)
    assert with_absolute_paths(config).data == config.data


# Mixtures.


def test_tasks_are_the_sources_of_a_mixture():
  path = "chain_sum(max_terms=3,min_terms=2),hard=chain_sum(min_terms=5),spell_backward"
  given = data(path, weights=(2.0, 1.0, 1.0))
  assert [source.name for source in sources_of(mixture_of(given))] == [
    "chain_sum",
    "hard",
    "spell_backward",
  ]
  task = tasks.make_task(given)
  shares = {name: share for name, (_, share) in task.train.shares().items()}
  assert shares == {"chain_sum": 0.5, "hard": 0.25, "spell_backward": 0.25}
  assert [example["task"] for example in task.test[:4]] == [
    "chain_sum",
    "hard",
    "spell_backward",
    "chain_sum",
  ]
  terms = [len(example["entry"]["metadata"]["expression"].split()) for example in task.test[:2]]
  assert terms[0] <= 5 and terms[1] >= 9
  assert tasks.name_of(given) == "chain_sum + hard + spell_backward"
  spelled = tuple(f"{one}=reasoning_gym:{one}" for one in ("chain_sum", "spell_backward"))
  mixed = tasks.make_task(Data(mixture=(*spelled, "arithmetic"), weights=(1.0, 1.0, 1.0)))
  assert mixed.test[1] == {**of("spell_backward", "test")[0], "task": "spell_backward"}
  assert mixed.test[2]["verifier"] is None and mixed.test[2]["entry"] is None


def test_prompts_have_templates_of_their_sources():
  given = data("chain_sum,ab", prompts=("Sum: {question}", "AB: {question}"))
  prompts = PromptSet(tasks.make_task(given).test[:2], QWEN, given)
  first, second = prompts.make([0, 1])
  assert first.text.startswith("Sum: ") and second.text.startswith("AB: ")
  with pytest.raises(ConfigError, match="data.prompts has 1 templates"):
    tasks.templates_of(data("chain_sum,ab", prompts=("{question}",)))


# The reward.


@pytest.mark.parametrize(
  "text, answer",
  [
    ("<answer>1</answer> <answer> 2\n3 </answer> 4", "2\n3"),
    ("So #### 5 \nmore", "5"),
    ("So ####\n1 2\n3 4\n", "1 2\n3 4"),
    (r"It is \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
    (r"\boxed{3", r"\boxed{3"),
    ("<think><answer>1</answer></think> 7 ", "7"),
    (" 42\n", "42"),
    ("<answer>1", "<answer>1"),
  ],
)
def test_the_answer_of_a_completion(text, answer):
  assert answer_of(text) == answer
  tagged = answer_of(text, tagged=True)
  assert tagged == (answer if "</answer>" in text and "</think>" not in text else None)
  assert answer_of(text.replace("answer>", "final>"), tag="final") == answer.replace(
    "answer>", "final>"
  )


def test_the_verifier_of_a_problem_scores_its_completions():
  sums = of("chain_sum(min_terms=2,max_terms=2)")
  example = sums[0]
  gold = int(example["answer"])
  texts = [f"#### {gold}", f"{gold}.0", f"{gold + 1}", "", "#### I think it is " + str(gold)]
  scores = score(texts, [example] * 5)
  assert scores[:4] == [1.0, 1.0, 0.0, 0.0] and 0 < scores[4] < 1
  assert score(texts, [example] * 5, partial=False) == [1.0, 1.0, 0.0, 0.0, 0.0]
  assert score([f"{gold}", f"<answer>{gold}</answer>"], [example] * 2, tagged=True) == [0.0, 1.0]
  assert score([f"<x>{gold}</x>"], [example], tag="x") == [1.0]
  other = {"verifier": None, "entry": None}
  assert score(["1", "1"], [other, example])[0] is None


def test_an_answer_that_a_verifier_fails_on_gets_nothing():
  example = of("prime_factorization")[0]
  with pytest.raises(ValueError):
    gym.open_dataset(gym.parse("prime_factorization", "k"), 0, 1).score_answer(
      "two", example["entry"]
    )
  assert score(["two", example["answer"]], [example] * 2) == [0.0, 1.0]


def test_an_answer_is_no_program(tmp_path):
  """Some verifiers call eval, and a policy must not learn to use it."""
  mark = tmp_path / "mark"
  attack = f"__import__('pathlib').Path('{mark}').touch()"
  queens, sums = of("n_queens")[0], of("simple_integration")[0]
  hidden = "exec(" + "+".join(f"chr({ord(one)})" for one in f"open('{mark}','w')") + ")"
  for example in (queens, sums):
    assert score([attack, hidden], [example] * 2) == [0.0, 0.0]
    assert score([f"<answer>{example['answer']}</answer>"], [example]) == [1.0]
  assert not mark.exists()
  board = str([row.split() for row in queens["answer"].split("\n")])
  assert score([board], [queens]) == [0.5]  # the package's, for a list of lists
  # SymPy's own name for the unsolved integral has the right derivative.
  unsolved = f"Integral({sums['entry']['metadata']['integrand']}, x) + C"
  assert score([unsolved], [sums]) == [0.0]


@pytest.mark.parametrize("tag", ["", "a b", "<x>"])
def test_a_tag_that_cannot_be_one_is_refused(tag):
  with pytest.raises(ConfigError, match="a tag is letters, digits and _"):
    rewards.resolve(f"reasoning_gym(tag={tag!r})", "reward.functions", lambda name: False)


def test_workers_score(request):
  """What a problem says of itself reaches a worker as it is: with fractions and tuples."""
  examples = [*of("gsm_symbolic")[:3], *of("rearc")[:1]]
  name = "reasoning_gym(partial=False)"
  function = rewards.resolve(name, "reward.functions", lambda name: False)
  caller = rewards.Caller(rewards.Pool(1, timeout=60.0, memory=4.0))
  request.addfinalizer(caller.close)
  assert caller.add({name: function}) == () and caller.uses_workers(function)
  columns = {field: [example[field] for example in examples] for field in examples[0]}
  columns["completions"] = [example["solution"] for example in examples[:-1]] + ["0"]
  answer = caller.start([function], columns, step=1, group_size=1)[0].result()
  assert [steps[0][1] for steps in answer.steps] == [1.0, 1.0, 1.0, 0.0]
  assert not answer.failures


# Runs.


@pytest.mark.slow
def test_a_run_draws_the_same_when_it_goes_on_and_has_an_accuracy_for_each_task(tmp_path):
  path = "chain_sum(max_terms=2),spell_backward,coin_flip"
  config = with_section(small_config(), "data", **vars(data(path)))
  config = with_section(config, "data", max_prompt_tokens=160)
  config = with_section(config, "reward", functions=("reasoning_gym",))
  config = with_section(config, "eval", every=1, examples=6, batch=6, function="reasoning_gym")
  config = with_section(config, "checkpoint", every=1)
  grpo_jax.train(config, tmp_path / "run")
  grpo_jax.train(dataclasses.replace(config, steps=2), tmp_path / "run")
  last = grpo_jax.read_metrics(tmp_path / "run")[-1]
  assert {f"eval/accuracy/{name}" for name in ("chain_sum", "spell_backward", "coin_flip")} <= set(
    last
  )
  assert last["rewards/reasoning_gym/unscored"] == 0
  for step in (1, 2):
    found = drawn(dataclasses.replace(config, steps=2), step)
    rows = grpo_jax.read_completions(tmp_path / "run", step)
    prompts = [prompt.text for prompt in found.prompts.make(found.indices)]
    assert [row["prompt"] for row in rows[:: config.batch.group_size]] == prompts


def test_the_tasks_are_listed():
  lines = list(task_lines())
  (line,) = [line for line in lines if line.split()[:1] == ["chain_sum"]]
  assert "min_terms=2, max_terms=6" in line
  assert "arithmetic:" in lines and any("103 tasks" in line for line in lines)
  assert any(line.split()[:1] == ["codeio"] for line in lines[-len(gym.REFUSED) :])
  found = list(knob_lines("chain_sum(max_terms=2)"))
  assert found[0] == "chain_sum (arithmetic)"
  assert "  max_terms       2   (default 6)" in found and found[-1].startswith("answer: ")
  with pytest.raises(ConfigError, match="flag --knobs: reasoning_gym has no task 'no'"):
    list(knob_lines("no"))


@pytest.mark.slow
def test_the_command_lists_the_tasks():
  command = [sys.executable, "-m", "grpo_jax.data", "--knobs=coin_flip"]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
  assert done.stdout.startswith("coin_flip (probability)")


# Every task.


def every_task():
  return sorted(set(gym._datasets()) - set(gym.REFUSED))


@pytest.mark.slow
@pytest.mark.parametrize("name", every_task())
def test_a_task_accepts_its_own_answers_and_no_others(name):
  count = 2 if name in SLOW else 12
  for split in ("train", "test"):
    examples = pickle.loads(pickle.dumps(of(name, split)[:count]))
    for example in examples:
      if name in WITHOUT_ANSWER:
        assert example["solution"] is None and example["answer"] == ""
      elif "Integral" not in example["answer"]:  # SymPy did not solve it: see above
        assert score([example["solution"]], [example]) == [1.0], example["answer"]
      texts = ["<answer>qqq wrong</answer>", "-7777.5", "[[", "no\nyes", "<answer>None</answer>"]
      assert max(score(texts, [example] * len(texts))) < 1
      if example["answer"]:
        assert score([""], [example]) == [0.0]
      json.dumps(example["question"])


@pytest.mark.slow
def test_every_task_makes_the_same_problems_in_every_process():
  code = (
    "import json, sys; from grpo_jax.problems import gym;"
    " from grpo_jax.data.tasks.reasoning_gym import Problems; order = int(sys.argv[1]);"
    " print(json.dumps({name: [Problems(gym.parse(name, 'k'), 'train')[i]['question']"
    " for i in range(3)[::order]][::order] for name in sys.argv[2:]}))"
  )
  names = [name for name in every_task() if name not in SLOW]
  found = []
  for seed, order in (("1", "1"), ("2", "-1")):
    environment = os.environ | {"PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", code, order, *names]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
    found.append(json.loads(done.stdout))
  assert [name for name in names if found[0][name] != found[1][name]] == []


# The table of pass rates.


def test_rates_go_on_after_a_line_that_was_cut_off(tmp_path):
  file, settings = tmp_path / "rates.jsonl", {"model": "m", "draws": 8}
  assert reasoning_gym_rates.read(file, settings) == (settings, [])
  row = dict(task="ab", category="algorithmic", problems=3, pass_rate=0.5, score=0.625)
  row |= dict(differ=1.0, differ_right=0.25, tokens=7.6, cut_off=0.1)
  with file.open("a") as out:
    out.write(json.dumps(row) + "\n" + '{"task": "chain_')
  assert reasoning_gym_rates.read(file, settings) == (settings, [row])
  assert file.read_text().endswith("}\n") and reasoning_gym_rates.read(file, settings) == (
    settings,
    [row],
  )
  with pytest.raises(SystemExit, match="was measured with"):
    reasoning_gym_rates.read(file, {"model": "other", "draws": 8})
  same = row | {"task": "gcd", "differ": 0.0}
  lines = list(reasoning_gym_rates.table([row, same, {"task": "arc_agi", "problems": 0}], 32))
  assert lines[2] == "| `ab` (3 problems) | algorithmic | 50.0% | 0.625 | 100% | 25% | 8 | 10% |"
  assert lines[3:] == ["", "No group differs: `gcd`.", "", "No prompt is short enough: `arc_agi`."]


SET_OFF = [
  "${}$",
  "$${}$$",
  r"\({}\)",
  r"\[{}\]",
  "**{}**",
  "`{}`",
  "```\n{}\n```",
  r"\text{{{}}}",
  r"\boxed{{{}}}",
  "{}.",
  " {} \n",
  r"**$\boxed{{\mathrm{{{}}}}}$.**",
]


@pytest.mark.parametrize("form", SET_OFF)
@pytest.mark.parametrize(
  "name", ["chain_sum", "gcd", "countdown", "spell_backward", "spiral_matrix", "caesar_cipher"]
)
def test_what_only_sets_an_answer_off_costs_nothing(name, form):
  one, other = of(name)[:2]
  right, wrong, plain = (
    f"<answer>{text}</answer>"
    for text in (form.format(one["answer"]), form.format(other["answer"]), other["answer"])
  )
  assert one["answer"] != other["answer"]
  found = score([right, wrong, plain], [one] * 3)
  assert found[0] == 1
  dataset = gym.open_dataset(gym.parse(name, "k"), 0, 1)
  as_it_stands = dataset.score_answer(answer_of(wrong), one["entry"])
  assert found[1] == pytest.approx(max(as_it_stands, found[2]), abs=0.011)  # 0.01 for any answer


def test_an_answer_that_holds_such_signs_is_still_right():
  for problem in of("fraction_simplification(styles=('latex_inline',))")[:3]:
    assert problem["answer"].startswith("$")
    texts = [f"<answer>{form.format(problem['answer'])}</answer>" for form in ("{}", "**{}**")]
    assert score(texts, [problem] * 2) == [1.0, 1.0]


def test_readings_of_an_answer():
  assert [*readings("**$62$.**")] == ["**$62$.**", "$62$.", "$62$", "62"]
  assert [*readings("**2**3*4**")] == ["**2**3*4**", "2**3*4"]
  for whole in ("$5$ and $6$", "**2** and **3**", "5...", r"\text{a} b}", r"\text{a}{b}", "$", ""):
    assert [*readings(whole)] == [whole]


def test_one_thread_at_a_time_makes_problems_with_the_generators_of_the_process():
  drawn_by = dict[str, list[float]]()

  def draw(name):
    with gym.same_everywhere(5):
      drawn_by[name] = [random.random() for _ in range(3) if not threading.Event().wait(0.01)]

  threads = [threading.Thread(target=draw, args=(name,)) for name in ("first", "second")]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  expected = random.Random(5)
  assert drawn_by["first"] == drawn_by["second"] == [expected.random() for _ in range(3)]
