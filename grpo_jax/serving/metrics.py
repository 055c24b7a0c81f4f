"""Statistics of a server in the text format of Prometheus."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from grpo_jax.serving.engine import Engine


class Metrics:
  """Counts requests. Call it only in the thread of the event loop.

  Attributes:
    requests: (path, HTTP status) -> how many requests were answered.
    seconds: path -> the total time of all answers.
    prompt_tokens: Prompt tokens of all accepted requests.
    active: How many requests are being answered now.
  """

  def __init__(self) -> None:
    """Starts all counts at 0."""
    self.requests: Counter[tuple[str, int]] = Counter()
    self.seconds = defaultdict[str, float](float)
    self.prompt_tokens = 0
    self.active = 0

  def text(self, engine: Engine) -> str:
    """All metrics as text, including those of the engine."""
    counts = engine.counts
    lines: list[str] = []

    def add(name: str, kind: str, values: Mapping[str, Any]) -> None:
      lines.append(f"# TYPE grpo_jax_{name} {kind}")
      lines.extend(f"grpo_jax_{name}{labels} {value}" for labels, value in values.items())

    # Keys are Prometheus labels, such as {path="/health",status="200"}, or "" for none.
    answered = {
      f'{{path="{path}",status="{status}"}}': count
      for (path, status), count in self.requests.items()
    }
    add("requests_total", "counter", answered)
    seconds = {f'{{path="{path}"}}': value for path, value in self.seconds.items()}
    add("request_seconds_total", "counter", seconds)
    add("prompt_tokens_total", "counter", {"": self.prompt_tokens})
    add("completion_tokens_total", "counter", {"": counts.tokens})
    add("rows_total", "counter", {"": counts.rows})
    add("prompt_tokens_computed_total", "counter", {"": counts.computed_tokens})
    add("prefix_cache_drops_total", "counter", {"": counts.drops})
    add("prefix_cache_entries", "gauge", {"": counts.texts})
    add("prompts_computed_total", "counter", {"": counts.prompts})
    add("prompt_calls_total", "counter", {"": counts.calls})
    add("prompts_copied_total", "counter", {"": counts.copies})
    add("chunks_total", "counter", {"": counts.chunks})
    add("decode_seconds_total", "counter", {"": counts.seconds})
    add("requests_active", "gauge", {"": self.active})
    add("rows_waiting", "gauge", {"": engine.waiting})
    add("rows_in_flight", "gauge", {"": engine.in_flight})
    add("weights_version", "gauge", {"": engine.version})
    return "\n".join(lines) + "\n"
