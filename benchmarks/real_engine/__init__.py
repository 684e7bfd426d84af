"""Train/rollout pairs from real inference engines: ``python -m benchmarks.real_engine``."""
