"""The learner: log-probs of completions that share their prompt, and one update."""
