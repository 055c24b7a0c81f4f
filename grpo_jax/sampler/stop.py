"""Stop texts, which end a completion. The host looks for them between two chunks."""

from collections.abc import Callable, Sequence

# (token ids of a row, how many of them were checked before) -> how many tokens the row keeps, which
# is more than were checked. None: the row goes on.
End = Callable[[Sequence[int], int], int | None]


def end_at(texts: Sequence[str], decode_text: Callable[[list[int]], str]) -> End:
  """Makes an `End` that keeps a row's tokens up to the first one that completes a stop text.

  All tokens are decoded together, because a character or a stop text may span several.

  Args:
    texts: The stop texts.
    decode_text: Token ids -> text.
  """

  def holds(ids: Sequence[int]) -> bool:
    text = decode_text([*ids])
    return any(stop in text for stop in texts)

  def end(ids: Sequence[int], checked: int) -> int | None:
    if not holds(ids):
      return None
    # The first `checked` tokens held no stop text.
    return next(count for count in range(checked + 1, len(ids) + 1) if holds(ids[:count]))

  return end
