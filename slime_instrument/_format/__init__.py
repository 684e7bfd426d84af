"""Dump files: schema, readers, pairing, join and the journal. Works where wrapt, megatron and slime are absent."""
