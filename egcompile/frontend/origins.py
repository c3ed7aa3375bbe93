"""Where a traced node came from: the path of its module and the line of the model's source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from egcompile.frontend._torch import source_line

_INDEX = re.compile(r"\[['\"]?([^'\"\]]*)['\"]?\]")


def origin_of(meta: Mapping[str, Any]) -> str | None:
    """`layers.0.mlp.up_proj (model.py:42)` from an fx node's `meta`; a part that is not known is left out."""
    stack = list((meta.get("nn_module_stack") or {}).values())
    path = module_path(str(stack[-1][0])) if stack else ""
    line = source_line(meta.get("stack_trace") or "")
    if path and line:
        return f"{path} ({line})"
    return path or line or None


def module_path(source: str) -> str:
    """A dotted path, `layers.0`, from export's `layers.0` or Dynamo's `L['self']._modules['layers'][0]`."""
    path = re.sub(r"^(L\['self'\]|L__self__|self)\.?", "", source)
    path = re.sub(r"^[LG]\['(\w+)'\]", r"\1", path)
    path = _INDEX.sub(r".\1", path)
    path = re.sub(r"\b_(modules|parameters|buffers)\b\.?", "", path)
    return path.strip(".")
