"""A progress bar in a notebook: an output of the cell that is updated in place.

rich's bar would need ipywidgets, whose outputs are empty when the notebook is reopened.
"""

from html import escape
import sys
from time import monotonic
from typing import Any

_SECONDS_BETWEEN_UPDATES = 0.5
_CHARACTERS = 40  # the length of the bar in plain text


def is_running() -> bool:
  """Whether this process is the kernel of a notebook. IPython on a terminal is not."""
  ipython = sys.modules.get("IPython")
  shell = ipython.get_ipython() if ipython else None
  return getattr(shell, "kernel", None) is not None


class Bar:
  """Implements the methods of rich.progress.Progress that `Terminal` uses, for one task.

  The state has an additional value: `below`, a text below the bar. A notebook saves the last state,
  so it later shows how the run ended.

  Attributes:
    doing: The line right below the bar, which names the work under way, or None for no line.
  """

  doing: str | None = None

  def __init__(self) -> None:
    """Shows nothing."""
    self._handle: Any = None
    self._state: dict[str, Any] = {}
    self._shown: dict[str, Any] = {}
    self._shown_at = -float("inf")

  def add_task(self, description: str, **state: Any) -> int:
    """Sets the state: total, completed and text. Returns the number of the task."""
    self._state = {"description": description, "below": "", **state}
    return 0

  def update(self, task: int, **state: Any) -> None:
    """Changes some values of the state, without showing them."""
    del task
    self._state = self._state | state

  def start(self) -> None:
    """Does nothing, because the first `refresh` shows the bar."""

  def refresh(self) -> None:
    """Shows the state, unless less than `_SECONDS_BETWEEN_UPDATES` have passed since the last."""
    is_last = self._state["completed"] >= self._state["total"]
    if is_last or monotonic() - self._shown_at >= _SECONDS_BETWEEN_UPDATES:
      self._show()

  def stop(self) -> None:
    """Shows the last state."""
    if self._handle is not None:
      self._show()

  def _show(self) -> None:
    """Creates the output or updates it, if the state has changed."""
    from IPython.display import display  # every notebook has IPython

    state = self._state
    if self.doing is not None:
      state = state | {"below": f"{self.doing}\n{state['below']}"}
    if state == self._shown:
      return
    self._shown, self._shown_at = state, monotonic()
    content = {"text/plain": as_text(state), "text/html": as_html(state)}
    if self._handle is None:
      self._handle = display(content, raw=True, display_id=True)
    else:
      self._handle.update(content, raw=True)


def as_text(state: dict[str, Any]) -> str:
  """Renders the state as plain text, for pages that cannot show HTML."""
  filled = round(_CHARACTERS * state["completed"] / max(1, state["total"]))
  bar = "█" * filled + "░" * (_CHARACTERS - filled)
  below = f"\n{state['below']}" if state["below"] else ""
  return f"{state['description']} {bar} {state['text']}{below}"


def as_html(state: dict[str, Any]) -> str:
  """Renders the state as HTML with a <progress> element."""
  return (
    '<div style="font-family: monospace; white-space: pre; overflow-x: auto">'
    f"{escape(state['description'])} "
    f'<progress value="{state["completed"]}" max="{max(1, state["total"])}"></progress> '
    f"{escape(state['text'])}</div>"
    f'<pre style="font-family: monospace; line-height: 1.2">{escape(state["below"])}</pre>'
  )
