"""The intermediate representation: immutable, hash-consed nodes, and graphs over them."""

from egcompile.ir.graph import Graph
from egcompile.ir.node import Attr, Node, topological
from egcompile.ir.types import DTYPE_NAMES, DTYPES, TensorType, ValueType, accumulate_dtype, is_differentiable

__all__ = [
    "DTYPES",
    "DTYPE_NAMES",
    "Attr",
    "Graph",
    "Node",
    "TensorType",
    "ValueType",
    "accumulate_dtype",
    "is_differentiable",
    "topological",
]
