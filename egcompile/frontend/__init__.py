"""The frontend: models traced by torch.export or Dynamo become graphs."""

from egcompile.frontend.export import Traced, trace
from egcompile.frontend.importer import Constant, Imported, import_fx

__all__ = ["Constant", "Imported", "Traced", "import_fx", "trace"]
