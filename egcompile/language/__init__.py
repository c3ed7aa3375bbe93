"""The e-graph's language: ops, nodes and rules as egglog text, and a saturated e-graph as plain data."""

from egcompile.language.egraph import EClass, EGraph, ENode
from egcompile.language.encode import program_text
from egcompile.language.render import rule_text, vjp_rules
from egcompile.language.session import Session
from egcompile.language.types import infer_types

__all__ = [
    "EClass",
    "EGraph",
    "ENode",
    "Session",
    "infer_types",
    "program_text",
    "rule_text",
    "vjp_rules",
]
