"""The folders of Hugging Face and PEFT: config.json and safetensors, read and written.

It may import what the decoder's parameters are (config, rope, stacks, lora). In this room, only
model/__init__.py imports it.
"""
