"""Games of the package textarena for one player: `environment.name=textarena:GuessTheNumber-v0`.

Tried without a network: GuessTheNumber, 2048, Mastermind, FrozenLake, Minesweeper, TowerOfHanoi.
Games of words, such as Wordle and Hangman, need lists that nltk downloads when they begin.
"""

from collections.abc import Iterator, Mapping
import contextlib
import io
import random
from typing import Any

import numpy as np

from grpo_jax.settings import ConfigError

_RAW = "-raw"  # ends the name of a game whose observations show only new text


class TextArena:
  """A game of one player.

  Its messages have the role user. The reward comes at the end, mostly from 0 to 1. If the run's
  limit of turns ends the game, there is no reward.
  """

  def __init__(self, id: str, **options: Any) -> None:
    """Stores the arguments. `reset` creates the game.

    Args:
      id: The name of the game, such as GuessTheNumber-v0.
      **options: Further arguments of `textarena.make`.
    """
    self._id, self._options = id.removesuffix(_RAW), options
    self._game: Any = None
    # Games use the global random generators of the process: `random`, numpy. This is their state
    # between two turns of this game.
    self._generators: tuple[Any, Any] = (None, None)

  def reset(self, example: Mapping[str, Any]) -> list[dict[str, str]]:
    """Begins the game with the example's field `seed`. Returns its first message.

    Raises:
      ConfigError: textarena or a word list is not installed, the game does not exist or needs
        several players, or the example has no seed.
    """
    try:
      with contextlib.redirect_stdout(io.StringIO()):
        import textarena  # imported here because it is an optional package
    except ImportError:
      raise ConfigError(
        "environment.name: games need the package textarena: pip install -e '.[textarena]'"
      ) from None
    if not isinstance(example.get("seed"), int):
      raise ConfigError(
        f"environment.name: a game begins with the field seed of an example, a whole number; this"
        f" one has {', '.join(example)}; data.task=seeds makes such examples"
      )
    seed = example["seed"]
    self._generators = random.Random(seed).getstate(), _words_of(seed)
    try:
      with self._drawing():
        self._game = textarena.make(self._id + _RAW, **self._options)
        self._game.reset(num_players=1, seed=seed)
    except Exception as error:  # each game raises other errors
      # nltk frames its errors with lines of *.
      lines = [line for line in str(error).splitlines() if line.strip(" *")]
      said = " ".join(" ".join(lines).split())[:200] or type(error).__name__
      raise ConfigError(
        f"environment.name: textarena cannot begin {self._id} with one player: {said}"
      ) from None
    return [{"role": "user", "content": self._news()}]

  def step(self, message: Mapping[str, Any]) -> tuple[list[dict[str, str]], float | None, bool]:
    """Plays the policy's move. Returns (messages, reward or None, whether the game is over)."""
    from textarena.wrappers import ActionFormattingWrapper

    move = ActionFormattingWrapper(self._game).action(message["content"])
    with self._drawing():
      is_over, _ = self._game.step(move)
    if not is_over:
      return [{"role": "user", "content": self._news()}], None, False
    rewards, about = self._game.close()
    reward = (rewards or {}).get(0, 0.0)
    if isinstance(reward, str):  # some games of 0.7.4 mix up the reward and the reason
      reward = about[0]["reason"].removeprefix("Invalid Move: ")
    return [], float(reward), True

  @contextlib.contextmanager
  def _drawing(self) -> Iterator[None]:
    """Sets the global random generators to the state of this game, and restores them afterwards."""
    before = random.getstate(), np.random.get_state()
    random.setstate(self._generators[0])
    np.random.set_state(self._generators[1])
    try:
      yield
    finally:
      self._generators = random.getstate(), np.random.get_state()
      random.setstate(before[0])
      np.random.set_state(before[1])

  def _news(self) -> str:
    """Returns the text that the game has added since the last call, without the policy's moves."""
    _, observed = self._game.get_observation()
    # Some games of 0.7.4 also send a number, which is a reward.
    texts = (text for sender, text, _ in observed if sender != 0 and isinstance(text, str))
    return "\n".join(text.strip() for text in texts)


def _words_of(seed: int) -> Any:
  """Returns the state of numpy's legacy generator after seeding."""
  return np.random.RandomState(seed % 2**32).get_state()
