"""Reading checkpoints: what the user typed -> files -> tensors, config, tokenizer.

A Python package, not a data folder. It imports nothing of jaxinfer, speaks Hugging Face tensor
names and config keys outward, and only `checkpoints.load` imports JAX:

    from checkpoints.resolve import resolve
    from checkpoints.checkpoint import open_checkpoint
    from checkpoints.load import WeightSpec, load_params
"""
