"""The folders of Hugging Face and PEFT: config.json and safetensors, read and written.

It may import the decoder's shapes (config, stacks, lora). The decoder does not know it.
"""
