"""Tasks, tokenizers, chat templates, and batches of prompts."""
