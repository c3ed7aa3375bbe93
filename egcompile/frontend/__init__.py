"""The frontend: models traced by torch.export or Dynamo become graphs."""

from egcompile.frontend.export import Traced, trace
from egcompile.frontend.importer import Constant, FxGraph, import_fx

__all__ = ["Constant", "FxGraph", "Traced", "import_fx", "trace"]
