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

_RAW = "-raw"  # ends the name of a game whose observations show only what is new


class TextArena:
  """A game of one player.

  Its messages have the role user. The game pays its reward at the end, mostly from 0 to 1. A game
  that a limit of turns ends has no reward.
  """

  def __init__(self, id: str, **options: Any) -> None:
    """Makes no game yet.

    Args:
      id: The name of the game, such as GuessTheNumber-v0.
      **options: Further arguments of `textarena.make`.
    """
    self._id, self._options = id.removesuffix(_RAW), options
    self._game: Any = None
    # Games draw from the generators of the whole process. This is their state between two turns.
    self._generators: tuple[Any, Any] = (None, None)

  def reset(self, example: Mapping[str, Any]) -> list[dict[str, str]]:
    """Begins the game with the example's field `seed`.

    Raises:
      ConfigError: textarena or a list of words is not installed, there is no such game, it is for
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
    except Exception as error:  # whatever its parts raise
      lines = [line for line in str(error).splitlines() if line.strip(" *")]
      said = " ".join(" ".join(lines).split())[:200] or type(error).__name__
      raise ConfigError(
        f"environment.name: textarena cannot begin {self._id} with one player: {said}"
      ) from None
    return [{"role": "user", "content": self._news()}]

  def step(self, message: Mapping[str, Any]) -> tuple[list[dict[str, str]], float | None, bool]:
    """Plays the move that the policy wrote."""
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
    """Sets the generators of the process to the state of this game, for the block."""
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
    """The text that the game has added since the last time."""
    _, observed = self._game.get_observation()
    # Some games of 0.7.4 also send a number, which is a reward.
    said = (text for sender, text, _ in observed if sender != 0 and isinstance(text, str))
    return "\n".join(text.strip() for text in said)


def _words_of(seed: int) -> Any:
  """The state of numpy's old generator for a seed."""
  return np.random.RandomState(seed % 2**32).get_state()
