"""Mismatch metrics while training runs. Loaded on the writer only, after a dump, and only when it was asked for.

Nothing here imports slime, wandb or TensorBoard: slime's own logging function is used where slime has loaded it.
"""
