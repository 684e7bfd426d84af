"""Mismatch metrics while training runs. The analysis behind them is loaded on the writer only, and only if asked for.

Nothing here imports slime, wandb or TensorBoard: slime's own logging function is used where slime has loaded it.
"""
