"""egcompile: an e-graph optimizing training compiler for PyTorch."""

from egcompile import errors, functional
from egcompile.api import compile, optimize, trace
from egcompile.backend import register
from egcompile.config import configure_logs
from egcompile.rules.rule import rule

__version__ = "0.1.0"

__all__ = ["__version__", "compile", "errors", "functional", "optimize", "rule", "trace"]

configure_logs()
register()
