"""Settings of every test: the IR is verified between passes, and kernels are interpreted without a GPU."""

import os
import tempfile

import pytest
import torch

os.environ["EGCOMPILE_CHECK"] = "1"
os.environ.setdefault("EGCOMPILE_CACHE_DIR", tempfile.mkdtemp(prefix="egcompile-tests-"))
torch.set_num_threads(1)  # tensors are small, and test processes run side by side
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write golden files instead of comparing")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
