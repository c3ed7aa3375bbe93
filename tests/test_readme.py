"""What README says is so: its example prints what stands there, and its commands are those that CI runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def example(name: str) -> tuple[str, str]:
    """An example's code and the output that README shows."""
    section = README.split(f"<!-- example:{name} -->")[1].split(f"<!-- /example:{name} -->")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (output,) = re.findall(r"```text\n(.*?)```", section, re.DOTALL)
    return code, output


def command(name: str) -> str:
    """The one line of the bash block under `<!-- command:NAME -->`."""
    (line,) = re.findall(rf"<!-- command:{name} -->\n```bash\n(.*)\n```", README)
    return line


@pytest.mark.parametrize("name", ["model", "rule"])
def test_an_example_prints_what_readme_shows(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """In a process of its own: a rule that it declares stays there. `--update-golden` writes the output."""
    code, output = example(name)
    script = tmp_path / "example.py"
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    if request.config.getoption("--update-golden"):
        page = ROOT / "README.md"
        page.write_text(page.read_text().replace(f"```text\n{output}```", f"```text\n{done.stdout}```"))
        output = done.stdout
    assert done.stdout == output


def test_the_first_example_is_short() -> None:
    assert len(example("model")[0].splitlines()) <= 15


def test_ci_runs_the_test_command() -> None:
    assert command("test") in (ROOT / ".ci" / "run").read_text().splitlines()


def test_the_training_command_runs_the_example() -> None:
    line = command("train")
    assert line.endswith("examples/train_language_model.py")
    assert (ROOT / "examples" / "train_language_model.py").exists()


def test_links_lead_to_files() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)[^)]*\)", text):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_files_that_the_pages_name_exist() -> None:
    """A path in backticks that looks like a file of the repository is one."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        for path in re.findall(
            r"`((?:egcompile|tests|examples|benchmarks|docs)/[\w./]+\.\w+)`", page.read_text()
        ):
            assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_the_code_in_contributing_is_the_code() -> None:
    """Each Python block of CONTRIBUTING stands, word for word, in the file that is named last before it."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    blocks = list(re.finditer(r"```python\n(.*?)```", page, re.DOTALL))
    assert blocks
    for block in blocks:
        *_, path = re.findall(r"`((?:egcompile|tests)/[\w./]+\.py(?:\.txt)?)`", page[: block.start()])
        assert block[1] in (ROOT / path).read_text(), f"{path} does not hold\n{block[1]}"
