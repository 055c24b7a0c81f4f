"""Writes the messages that TRL's trainer makes of the answers in tests/agent_functions.py, and the
rewards that it gives for them.

  pip install torch trl && PYTHONPATH=. python tests/golden/make_agent.py

The trainer is TRL's own, with a small random model. Only what its model would write is replaced by
the answers. The chat template is Qwen3's, of which TRL knows how to read calls.

Made with transformers 5.24.0, trl 1.16.0 and torch 2.13.0.
"""

import copy
import json
from pathlib import Path
import tempfile

import datasets
import transformers
import trl

from tests import agent_functions, small_qwen
from tests.agent_functions import ANSWERS, REWARDS

TEMPLATE = Path(trl.__file__).parent / "chat_templates/qwen3.jinja"


def tokenizer(folder):
  corpus = (
    json.dumps(ANSWERS) + "\n user assistant system tool " + "".join(map(chr, range(33, 127)))
  )
  small_qwen.write_tokenizer(folder, small_qwen.trained_tokenizer([corpus]))
  tokens = transformers.AutoTokenizer.from_pretrained(folder)
  tokens.chat_template = TEMPLATE.read_text()
  return tokens


def trainer(folder, tokens, rewards):
  config = transformers.Qwen2Config(
    vocab_size=len(tokens),
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    eos_token_id=tokens.eos_token_id,
    pad_token_id=tokens.pad_token_id,
  )
  settings = trl.GRPOConfig(
    output_dir=str(folder / "out"),
    per_device_train_batch_size=len(ANSWERS),
    num_generations=len(ANSWERS),
    max_completion_length=2000,
    report_to=[],
    use_cpu=True,
    bf16=False,
  )
  row = {"prompt": [{"role": "user", "content": "Is there an ant?"}], "answer": "yes"}
  return trl.GRPOTrainer(
    transformers.Qwen2ForCausalLM(config),
    rewards,
    args=settings,
    train_dataset=datasets.Dataset.from_list([row] * len(ANSWERS)),
    processing_class=tokens,
    tools=[agent_functions.find, agent_functions.later],
  )


def main():
  messages, rewards = [], {}

  def watched(function):
    def reward(completions, **columns):
      messages[:] = copy.deepcopy(completions)
      rewards[function.__name__] = function(completions, **columns)
      return rewards[function.__name__]

    reward.__name__ = function.__name__
    return reward

  with tempfile.TemporaryDirectory() as parent:
    folder = Path(parent)
    tokens = tokenizer(folder)
    made = trainer(folder, tokens, [watched(function) for function in REWARDS])
    asked = 0  # how often the model was asked

    def answer(prompt_ids, *_, **__):
      nonlocal asked
      texts = [one[asked] for one in ANSWERS if len(one) > asked]
      assert len(texts) == len(prompt_ids)  # rows whose answer was a call go on
      asked += 1
      texts = [agent_functions.written(text) + tokens.eos_token for text in texts]
      return [tokens.encode(text, add_special_tokens=False) for text in texts], None

    made._generate_single_turn = answer
    made._generate_and_score_completions([made.train_dataset[i] for i in range(len(ANSWERS))])
  found = {"messages": messages, "rewards": rewards}
  (Path(__file__).parent / "agent.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
  main()
