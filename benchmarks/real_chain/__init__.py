"""Real engine, real model, real slime, one dump: ``python -m benchmarks.real_chain``."""
