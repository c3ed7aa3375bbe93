"""What README says is so: its example prints what stands there, and its commands are those that CI runs."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def example() -> tuple[str, str]:
    """The example's code and the output that README shows."""
    section = README.split("<!-- example -->")[1].split("<!-- /example -->")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (output,) = re.findall(r"```text\n(.*?)```", section, re.DOTALL)
    return code, output


def command(name: str) -> str:
    """The one line of the bash block under `<!-- command:NAME -->`."""
    (line,) = re.findall(rf"<!-- command:{name} -->\n```bash\n(.*)\n```", README)
    return line


def run(code: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {"__name__": "__readme__"})
    return printed.getvalue()


def test_the_example_prints_what_readme_shows() -> None:
    code, output = example()
    assert len(code.splitlines()) <= 15
    assert run(code) == output


def test_ci_runs_the_test_command() -> None:
    assert command("test") in (ROOT / ".ci" / "run").read_text().splitlines()


def test_the_training_command_runs_the_example() -> None:
    line = command("train")
    assert line.endswith("examples/train_language_model.py")
    assert (ROOT / "examples" / "train_language_model.py").exists()


def test_links_lead_to_files() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)[^)]*\)", page.read_text()):
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
