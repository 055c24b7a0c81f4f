"""Texts that end a completion. The host looks for them between two chunks."""

from collections.abc import Callable, Sequence

# (token ids of a row, how many of them were looked at before) -> how many to keep, which are more
# than were looked at, or None.
End = Callable[[Sequence[int], int], int | None]


def end_at(texts: Sequence[str], decode_text: Callable[[list[int]], str]) -> End:
  """Ends a row at the first token with which its text holds one of `texts`.

  Args:
    texts: The texts that end a row.
    decode_text: Makes a text from token ids.
  """

  def holds(ids: Sequence[int]) -> bool:
    text = decode_text([*ids])
    return any(stop in text for stop in texts)

  def end(ids: Sequence[int], seen: int) -> int | None:
    if not holds(ids):
      return None
    return next(count for count in range(seen + 1, len(ids) + 1) if holds(ids[:count]))

  return end
