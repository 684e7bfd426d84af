"""Offline analysis of dumps: join train to rollout, measure the mismatch, name its cause, export tables."""
