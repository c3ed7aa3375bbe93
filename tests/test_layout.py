"""The shape of the source: who imports whom, where outside libraries are used, how long files are."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "egcompile"
LONGEST = 500

FILES = sorted(PACKAGE.rglob("*.py"))
STAGES = {
    # stage -> the parts of egcompile that it may import, besides itself and the ones anybody may
    "errors": "",
    "config": "",
    "target": "",
    "ir": "ops",
    "ops": "ir",
    "frontend": "ir ops",
    "rules": "ops",
    "language": "ir ops rules",
    "recognize": "ir ops rules language",
    "differentiable": "ir ops rules",
    "derive": "ir ops rules language recognize differentiable",
    "saturate": "ir ops rules language",
    "extract": "ir ops language",
    "partition": "ir ops extract",
    "schedule": "ir ops extract partition",
    "codegen": "ir ops schedule",
    "runtime": "ir ops schedule",
    "tune": "ir ops schedule codegen runtime",
}
"""The pipeline, in its direction. What is not listed (the API, plans, explanations) sees all of it."""

ANYBODY = {"errors", "config", "target"}
LIBRARIES = {
    # library -> the parts that may import it
    "egglog": {"language", "rules", "saturate", "extract"},
    "triton": {"runtime"},
    "highspy": {"extract"},
    "networkx": {"ir", "partition", "schedule"},
}


def stage_of(file: Path) -> str:
    """The part of the package that a file belongs to: a folder, or a module at the top."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(file: Path) -> Iterator[tuple[str, int]]:
    """Every module that a file imports by name, anywhere in it, and the line; refuses relative imports."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: a relative import"
            yield node.module or "", node.lineno
            if node.module == "egcompile":
                yield from ((f"egcompile.{alias.name}", node.lineno) for alias in node.names)


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_follow_the_pipeline(file: Path) -> None:
    stage = stage_of(file)
    allowed = {stage, *ANYBODY, *STAGES.get(stage, "").split()}
    for module, line in imports(file):
        parts = module.split(".")
        if parts[0] == "egcompile" and len(parts) > 1 and stage in STAGES:
            assert parts[1] in allowed, f"{file.relative_to(ROOT)}:{line}: {stage} imports {module}"
        if parts[0] in LIBRARIES:
            users = LIBRARIES[parts[0]]
            assert stage in users, f"{file.relative_to(ROOT)}:{line}: {parts[0]} is imported by {users} only"


def test_private_torch_is_in_one_place_a_package() -> None:
    """Calls into torch's private modules stand in files named `_torch.py`, tested against each version."""
    offenders = [
        f"{file.relative_to(ROOT)}:{line}: {module}"
        for file in FILES
        if file.name != "_torch.py"
        for module, line in imports(file)
        if module.split(".")[0] == "torch" and any(p.startswith("_") for p in module.split(".")[1:])
    ]
    assert not offenders, "\n".join(offenders)


def test_files_hold_one_idea() -> None:
    """No file of the repository that is Python is longer than 500 lines."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    long = {name: n for name in listed if (n := len((ROOT / name).read_text().splitlines())) > LONGEST}
    assert not long


def test_every_part_of_the_package_has_a_docstring() -> None:
    missing = [
        str(file.relative_to(ROOT))
        for file in FILES
        if file.read_text().strip() and ast.get_docstring(ast.parse(file.read_text())) is None
    ]
    assert not missing
