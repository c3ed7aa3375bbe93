"""The process that compiles to cubins for the tests of this one.

It does not interpret kernels, which is settled where triton is imported. The imports take ten times as
long as a kernel does, so one process answers as long as the tests last.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("compile_cubins.py")


class Compiler:
    """A running `compile_cubins.py`, until it is closed or a kernel brings it down."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="egcompile-cubins-")
        self.log = Path(self.folder.name) / "log"  # a pipe that is not read would fill up
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, SCRIPT],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
            )
        atexit.register(self.close)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """`functions`, as `compile_launcher` has them, or `error`, with what was printed meanwhile."""
        assert self.process.stdin is not None and self.process.stdout is not None
        before = self.log.stat().st_size
        print(json.dumps(request), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"the compiler ended with {self.process.wait()}"}
        if "error" in answer:
            printed = self.log.read_bytes()[before:].decode(errors="replace")
            answer["error"] = f"{printed}\n{answer['error']}"
        return answer

    def close(self) -> None:
        self.process.communicate()
        self.folder.cleanup()


_running: Compiler | None = None


def ask(request: dict[str, Any]) -> dict[str, Any]:
    """`Compiler.ask` of the one that runs; of a new one after one that was brought down."""
    global _running
    if _running is None or _running.process.poll() is not None:
        _running = Compiler()
    return _running.ask(request)
