"""egcompile: an e-graph optimizing training compiler for PyTorch."""

__version__ = "0.1.0"
