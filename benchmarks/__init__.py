"""Training-step benchmarks: `python -m benchmarks.models --help`."""
