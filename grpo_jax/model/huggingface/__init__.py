"""Reads and writes the folders of Hugging Face and PEFT: config.json and safetensors files.

It may import the modules that define the decoder's parameters (config, rope, stacks, lora). Within
grpo_jax/model, only __init__.py imports it.
"""
