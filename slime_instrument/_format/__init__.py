"""Dump files: schema, readers of every form, validator. Works where wrapt, megatron and slime are absent."""
