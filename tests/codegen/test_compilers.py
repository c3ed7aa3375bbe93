"""A module that cannot be compiled fails the test that asked, and no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from egcompile.ops import neg
from tests.codegen import compilers
from tests.codegen.harness import build, cubins

pytest.importorskip("triton")


def ask(path: Path, text: str) -> dict[str, Any]:
    path.write_text(text)
    return compilers.ask({"path": str(path), "launcher": "launch", "arch": 90, "tensors": []})


def compiles() -> None:
    assert cubins(build(neg, "f32[300]"), 90)


def test_an_error_is_the_askers(tmp_path: Path) -> None:
    answer = ask(tmp_path / "raises.py", "print('before')\nraise ValueError('the fault')")
    assert answer.keys() == {"error"}
    assert "before" in answer["error"] and "ValueError: the fault" in answer["error"]
    compiles()
    running = compilers._running
    assert "ZeroDivisionError" in ask(tmp_path / "raises too.py", "def launch():\n    1 / 0")["error"]
    compiles()
    assert compilers._running is running


@pytest.mark.parametrize("end", ["os.abort()", "os._exit(0)"])
def test_a_process_that_ends_is_replaced(tmp_path: Path, end: str) -> None:
    answer = ask(tmp_path / "ends.py", f"import os\nprint('before', flush=True)\n{end}")
    assert "before" in answer["error"] and "the compiler ended with" in answer["error"]
    compiles()
