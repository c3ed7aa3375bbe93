"""The environment's settings."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from egcompile import config
from egcompile.api import optimize, trace
from tests.models import CASES


@pytest.fixture(autouse=True)
def _quiet_again() -> Iterator[None]:
    yield
    for topic in config.TOPICS:
        log = config.logger(topic)
        log.setLevel(logging.NOTSET)
        for handler in list(log.handlers):
            log.removeHandler(handler)


def test_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EGCOMPILE_CACHE_DIR", "/somewhere/else")
    assert config.cache_dir() == Path("/somewhere/else")
    monkeypatch.delenv("EGCOMPILE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert config.cache_dir() == Path("/caches/egcompile")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert config.cache_dir() == Path.home() / ".cache" / "egcompile"


def test_logs_of_each_topic(capsys: pytest.CaptureFixture[str]) -> None:
    """What a topic shows, on stderr, and nothing of the others."""
    expected = {
        "kernels": "add_rms_norm",
        "graphs": "after:\ngraph(",
        "rules": "fusion/add_rms_norm",
        "source": "def forward(",
        "passes": "[egcompile passes] saturate:",
    }
    assert expected.keys() == set(config.TOPICS)
    model, inputs = CASES["residual_block"].make(torch.float32)
    traced = trace(model, inputs)
    for topic, text in expected.items():
        config.configure_logs(topic)
        capsys.readouterr()
        assert optimize(traced, target="cuda:90").source
        printed = capsys.readouterr().err
        assert text in printed
        assert {line.split("]")[0] for line in printed.splitlines() if line.startswith("[")} == {
            f"[egcompile {topic}"
        }
        config.logger(topic).setLevel(logging.NOTSET)


def test_unknown_topics() -> None:
    with pytest.raises(ValueError, match="no log topic 'kernel'; there are kernels, graphs"):
        config.configure_logs("graphs,kernel")
