"""What the instrumentation costs, measured: ``python -m benchmarks.dump_cost`` and others, one command each."""
