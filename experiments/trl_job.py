"""One small GRPO job for both programs, and TRL's side of it. `against_trl.py` is the command."""

from collections.abc import Iterator, Sequence
import dataclasses
import os
from pathlib import Path
from typing import Any

from needs import needs

# Before the import of TRL, which reads them.
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # says that rollout_func may change
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here is on huggingface.co


from grpo_jax.data.tasks.arithmetic import Arithmetic
from grpo_jax.rewards import REWARDS

with needs("pip install torch trl==1.16.0"):
  import datasets
  import torch
  import transformers
  from trl import GRPOConfig, GRPOTrainer

Row = dict[str, Any]
Step = list[Row]  # the rows of one file of completions/: prompt after prompt, each with its group


@dataclasses.dataclass(frozen=True)
class Job:
  """Sums of four numbers, sampled and learnt in float32, with one update per batch."""

  steps: int = 60
  prompts: int = 32
  group: int = 8
  max_tokens: int = 40
  learning_rate: float = 1e-4  # falls to 0 in a straight line
  kl_coef: float = 0.04

  def ours(self) -> dict[str, Any]:
    """Config keys of grpo_jax that differ from its defaults.

    The last three repeat TRL's defaults. All other defaults of the algorithm and of the optimizer
    are the same.
    """
    return {
      "steps": self.steps,
      "batch.prompts": self.prompts,
      "batch.group_size": self.group,
      "data.max_prompt_tokens": 12,
      "sampling.max_tokens": self.max_tokens,
      "optimizer.learning_rate": self.learning_rate,
      "algo.kl_coef": self.kl_coef,
      "optimizer.schedule": "linear",
      "algo.aggregation": "token_mean",
      "algo.kl_importance_weighted": True,
    }

  def theirs(self, folder: Path, seed: int) -> GRPOConfig:
    """Fields of TRL that differ from its defaults.

    Only `bf16` changes what is computed beyond the sizes above. The others change how it is
    computed and what is written.
    """
    return GRPOConfig(
      max_steps=self.steps,
      per_device_train_batch_size=self.prompts * self.group,
      num_generations=self.group,
      max_completion_length=self.max_tokens,
      learning_rate=self.learning_rate,
      beta=self.kl_coef,
      bf16=False,
      gradient_checkpointing=False,
      use_cpu=True,
      seed=seed,
      output_dir=str(folder),
      logging_steps=1,
      report_to="none",
      save_strategy="no",
      disable_tqdm=True,
    )


class Replay(GRPOTrainer):
  """TRL's trainer on recorded completions. It samples nothing; all else is TRL's own code.

  Attributes:
    advantages: Of each step, as TRL computed them from the recorded rewards.
    logprob_gaps: For each step, how far TRL's log-prob of a token is from the recorded one, at the
      token where it is farthest.
  """

  def __init__(self, recording: Sequence[Step], **arguments: Any) -> None:
    self._recording: Iterator[Step] = iter(recording)
    self.advantages: list[list[float]] = []
    self.logprob_gaps: list[float] = []
    super().__init__(reward_funcs=recorded_rewards, rollout_func=self._recorded, **arguments)

  def metrics(self) -> list[dict[str, float]]:
    """TRL's metrics of each step."""
    return metrics_of(self)

  def _recorded(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
    """What TRL calls in the place of its own generation."""
    del trainer
    rows = next(self._recording)
    if [row["prompt"] for row in rows] != prompts:
      raise ValueError("TRL asks for other prompts than those that were recorded")
    return {
      "prompt_ids": [row["prompt_ids"] for row in rows],
      "completion_ids": [row["completion_ids"] for row in rows],
      "logprobs": [row["logprobs"] for row in rows],
      "recorded": [row["reward"] for row in rows],
    }

  def _get_per_token_logps_and_entropies(
    self, model: torch.nn.Module, *arguments: Any, **options: Any
  ) -> tuple:
    result = super()._get_per_token_logps_and_entropies(model, *arguments, **options)
    if model is not self.ref_model:
      self._logprobs = result[0].detach()
    return result

  def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = super()._compute_loss(model, inputs)
    gaps = (self._logprobs - inputs["sampling_per_token_logps"]).abs() * inputs["completion_mask"]
    self.logprob_gaps.append(gaps.max().item())
    return loss

  def _generate_and_score_completions(self, inputs: list[Row]) -> dict[str, Any]:
    output = super()._generate_and_score_completions(inputs)
    self.advantages.append(output["advantages"].tolist())
    return output


def recorded_rewards(recorded: list[float], **columns: Any) -> list[float]:
  """A reward function that returns what was recorded."""
  del columns
  return recorded


def replay(job: Job, model: Path, recording: Sequence[Step], out: Path, attention: str) -> Replay:
  """Trains TRL on the recorded completions, one update for each recorded step.

  Args:
    job: The job that was recorded.
    model: The transformers folder that it started from.
    recording: The rows of each step.
    out: Where TRL may write.
    attention: The implementation that transformers uses: sdpa is its default, and eager is another.

  Returns:
    The trainer after its last step.
  """
  arguments = job.theirs(out, seed=0)
  arguments.shuffle_dataset = False
  arguments.model_init_kwargs = {"attn_implementation": attention}
  prompts = [row["prompt"] for rows in recording for row in rows[:: job.group]]
  trainer = Replay(
    recording,
    model=str(model),
    args=arguments,
    processing_class=tokenizer_of(model),
    train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
  )
  _train(trainer)
  return trainer


def train_freely(job: Job, model: Path, seed: int, out: Path) -> list[dict[str, float]]:
  """Trains with TRL as a user would: it samples the completions itself.

  Args:
    job: What to train.
    model: The transformers folder to start from.
    seed: TRL's seed.
    out: Where TRL may write.

  Returns:
    TRL's metrics of each step.
  """
  examples = Arithmetic("train")[:]
  columns = {
    "prompt": [example["question"] for example in examples],
    "answer": [example["answer"] for example in examples],
  }
  trainer = GRPOTrainer(
    model=str(model),
    reward_funcs=REWARDS["strict"],
    args=job.theirs(out, seed),
    processing_class=tokenizer_of(model),
    train_dataset=datasets.Dataset.from_dict(columns),
  )
  return _train(trainer)


def tokenizer_of(model: Path) -> transformers.PreTrainedTokenizerFast:
  """The tokenizer.json of a folder as it is, whatever the model's own tokenizer class would do."""
  return transformers.PreTrainedTokenizerFast(
    tokenizer_file=str(model / "tokenizer.json"), eos_token="<eos>", pad_token="<pad>"
  )


def _train(trainer: GRPOTrainer) -> list[dict[str, float]]:
  """Trains to the end. Returns the metrics of each step."""
  trainer.remove_callback(transformers.PrinterCallback)
  trainer.train()
  return metrics_of(trainer)


def metrics_of(trainer: GRPOTrainer) -> list[dict[str, float]]:
  """TRL's metrics of each step. Its last entry is a summary and has no gradient."""
  return [row for row in trainer.state.log_history if "grad_norm" in row]
