"""On-policy distillation: a teacher grades each token that the policy sampled."""

import jax

from grpo_jax import masked


def teacher_advantages(
  teacher_logprobs_PGT: jax.Array, policy_logprobs_PGT: jax.Array, mask_PGT: jax.Array
) -> jax.Array:
  """log p_teacher(token) - log p_policy(token), 0 outside the mask.

  The mean over tokens that the policy samples is the negative reverse KL, -KL(policy || teacher).
  So a policy gradient with these advantages lowers the reverse KL of each next token, as in GKD
  (arXiv 2306.13649) with on-policy data, whose gradient MiniLLM (arXiv 2306.08543) derives. A token
  gets no credit for the tokens after it.

  Args:
    teacher_logprobs_PGT: float32, log-probs of the completions under the teacher.
    policy_logprobs_PGT: float32, log-probs of the completions under the policy that sampled them.
    mask_PGT: float32, the loss mask.

  Returns:
    float32 [P, G, T].
  """
  return masked.masked(teacher_logprobs_PGT - policy_logprobs_PGT, mask_PGT)
