"""What a plan is made of, in words and numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from egcompile.pipeline import Compiled


def explain(compiled: Compiled) -> str:
    return str(compiled.report)
