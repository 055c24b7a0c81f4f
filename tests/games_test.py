"""Games of textarena as environments."""

import pickle

import pytest
from small_run import Collected, small_config, with_section

from grpo_jax.environments.adapters.games import TextArena
from grpo_jax.settings import ConfigError

GAMES = {
  "GuessTheNumber-v0": ["[10]", "5", "no number", "[15]"],
  "2048-v0": ["[Up]", "Left", "jump", "[Down]"],
  "Mastermind-v0": ["[1 2 3 4]", "[2 1 4 5]", ""],
  "FrozenLake-v0": ["[right]", "[down]", "x" * 5000],
  "Minesweeper-v0": ["[3 2]", "[0 0]", "[99 99]"],
  "TowerOfHanoi-v0": ["[A C]", "[A B]", "[B B]"],
  # These mix up the reward and the reason of an invalid move.
  "Countdown-v0": ["[1+1]", "[1+1]", "[1+1]"],
  "Cryptarithm-v0": ["[A 1]", "[A 1]", "[A 1]"],
  "Slitherlink-v0": ["[h 0 0]", "[x]", "[x]"],
  "ThreeCardMonte-v0": ["[9]", "[9]", "[9]"],
}


def played(name, seed, moves, copies=False):
  game = TextArena(name)
  said = [game.reset({"seed": seed})]
  for move in moves:
    game = pickle.loads(pickle.dumps(game)) if copies else game
    said.append(game.step({"role": "assistant", "content": move}))
    if said[-1][2]:
      break
  return said


@pytest.mark.parametrize("name", GAMES)
def test_a_game_depends_on_its_seed_and_moves_and_can_be_pickled(name):
  said = played(name, 3, GAMES[name])
  assert said == played(name, 3, GAMES[name], copies=True)
  (opening,) = said[0]
  assert opening["role"] == "user" and len(opening["content"]) > 40
  for messages, reward, is_over in said[1:]:
    assert is_over == (reward is not None) == (not messages)
    # What the game said before, and the move itself, are not said again.
    assert all(opening["content"] not in one["content"] for one in messages)


def test_the_game_ends_with_its_reward():
  """Guessing upwards finds a number up to 10. The reward of another one says how far it is."""
  found = 0
  for seed in range(8):
    said = played("GuessTheNumber-v0", seed, [f"[{n}]" for n in range(1, 21)])
    _, reward, is_over = said[-1]
    guesses = len(said) - 1
    number = guesses + round(19 * (1 - reward))
    assert is_over and played("GuessTheNumber-v0", seed, [f"[{number}]"])[-1] == ([], 1.0, True)
    assert reward == pytest.approx(1 - (number - guesses) / 19)
    found += reward == 1
  assert 0 < found < 8


@pytest.mark.parametrize(
  "name, example, words",
  [
    ("NoSuchGame-v0", {"seed": 1}, "cannot begin NoSuchGame-v0"),
    ("TicTacToe-v0", {"seed": 1}, "cannot begin TicTacToe-v0 with one player"),
    ("GuessTheNumber-v0", {"question": "a"}, "this one has question; data.task=seeds"),
  ],
)
def test_what_cannot_be_played_is_named_in_a_line(name, example, words):
  with pytest.raises(ConfigError, match=words) as caught:
    TextArena(name).reset(example)
  assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_run_plays_in_workers(capfd):
  config = small_config()
  config = with_section(config, "data", task="seeds", prompt="", max_prompt_tokens=640)
  config = with_section(config, "sampling", max_tokens=400)
  name = "textarena:GuessTheNumber-v0"
  config = with_section(config, "environment", name=name, turn_tokens=8, max_turns=3)
  config = with_section(config, "reward", functions=("environment",), workers=2)
  found = Collected(config)
  assert all("between 1 and 20" in row["prompt"] for row in found.rows)
  assert found.metrics["environment/turns"] > 1 and not found.metrics["environment/errors"]
