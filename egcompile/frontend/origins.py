"""Where a traced node came from: the path of its module and the line of the model's source."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import torch

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_INDEX = re.compile(r"\[['\"]?([^'\"\]]*)['\"]?\]")
_LIBRARY = os.path.dirname(torch.__file__) + os.sep


def origin_of(meta: Mapping[str, Any]) -> str | None:
    """`layers.0.mlp.up_proj (model.py:42)` from an fx node's `meta`; a part that is not known is left out."""
    stack = list((meta.get("nn_module_stack") or {}).values())
    path = module_path(str(stack[-1][0])) if stack else ""
    line = _source_line(meta.get("stack_trace") or "")
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


def _source_line(trace: str) -> str:
    """The innermost frame outside of torch, as `model.py:42`."""
    frames = [(file, line) for file, line in _FRAME.findall(trace) if not file.startswith(_LIBRARY)]
    return f"{os.path.basename(frames[-1][0])}:{frames[-1][1]}" if frames else ""
