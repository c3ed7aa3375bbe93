"""Source text to callables, through a file: Triton reads a kernel's source from the file that defines it."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from types import ModuleType

from egcompile.config import cache_dir
from egcompile.errors import CacheCorrupt, CompileError

_LOADING = threading.Lock()


def load(source: str) -> ModuleType:
    """The module that `source` is, once a process; raises CompileError, with the source, if it fails.

    The text is kept under its hash in the cache directory. A file there with other text is replaced,
    with a CacheCorrupt warning.
    """
    with _LOADING:  # a second thread must not find the module half done
        return _load(source)


def _load(source: str) -> ModuleType:
    name = f"egcompile_plan_{hashlib.sha256(source.encode()).hexdigest()[:20]}"
    if (loaded := sys.modules.get(name)) is not None:
        return loaded
    module = ModuleType(name)
    sys.modules[name] = module
    try:
        _execute(module, _kept(f"{name}.py", source), source)
    except CompileError:
        del sys.modules[name]
        raise
    return module


def load_once(source: str) -> ModuleType:
    """The module that `source` is, of which nothing is kept; raises as `load`."""
    module = ModuleType("egcompile_kernel")
    with tempfile.TemporaryDirectory(prefix="egcompile-") as folder:
        path = Path(folder, "kernel.py")
        path.write_text(source, encoding="utf-8")
        _execute(module, path, source)
    return module


def _execute(module: ModuleType, path: Path, source: str) -> None:
    module.__file__ = str(path)
    try:
        exec(compile(source, path, "exec"), module.__dict__)  # no import: it would leave bytecode behind
    except Exception as error:
        raise CompileError(
            f"generated source does not run: {type(error).__name__}: {error}", source
        ) from error


def _kept(name: str, text: str) -> Path:
    """The file in the cache directory, or in a temporary one where that cannot be written."""
    try:
        return store(name, text)
    except OSError as error:
        path = Path(tempfile.mkdtemp(prefix="egcompile-"), name)
        warnings.warn(f"generated source goes to {path}, for EGCOMPILE_CACHE_DIR: {error}", stacklevel=4)
        path.write_text(text, encoding="utf-8")
        return path


def store(name: str, text: str) -> Path:
    """The file `name` of the cache directory, holding `text`; it is written in one step, or not at all."""
    path = cache_dir() / name
    try:
        if path.read_text(encoding="utf-8") == text:
            return path
        warnings.warn(
            CacheCorrupt(f"{path} did not hold what its name says; it is written anew"), stacklevel=5
        )
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
    except UnicodeDecodeError:
        warnings.warn(CacheCorrupt(f"{path} is not text; it is written anew"), stacklevel=5)
    write(path, text)
    return path


def write(path: Path, text: str) -> None:
    """Makes the file hold `text`, in one step or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(temporary, path)
