"""Settings, all from the environment, and the loggers they open.

EGCOMPILE_LOGS       a list out of kernels, graphs, rules, source, passes: what to print on stderr
EGCOMPILE_CACHE_DIR  where sources and tuned tiles are kept; `egcompile` in the user's cache folder if unset
EGCOMPILE_CHECK      1 verifies the IR between passes
EGCOMPILE_DISABLE    1 runs everything eagerly, through PyTorch alone
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

TOPICS = ("kernels", "graphs", "rules", "source", "passes")
"""What EGCOMPILE_LOGS can name.

kernels  each plan's kernels and calls, and recompilations with their reason
graphs   the graph before and after optimization, as text
rules    matches and time of each rule
source   each plan's generated source
passes   seconds and sizes of each pass
"""


def cache_dir() -> Path:
    if path := os.environ.get("EGCOMPILE_CACHE_DIR"):
        return Path(path)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "egcompile"


def checking() -> bool:
    return os.environ.get("EGCOMPILE_CHECK") == "1"


def disabled() -> bool:
    return os.environ.get("EGCOMPILE_DISABLE") == "1"


def logger(topic: str) -> logging.Logger:
    """The logger `egcompile.<topic>`; it is silent below warnings unless EGCOMPILE_LOGS names the topic."""
    if topic not in TOPICS:
        raise ValueError(f"no log topic {topic!r}; there are {', '.join(TOPICS)}")
    return logging.getLogger(f"egcompile.{topic}")


def configure_logs(topics: str | None = None) -> None:
    """Opens the topics that `topics`, or EGCOMPILE_LOGS, lists; raises ValueError for an unknown one."""
    names = os.environ.get("EGCOMPILE_LOGS", "") if topics is None else topics
    for topic in filter(None, names.split(",")):
        log = logger(topic.strip())
        log.setLevel(logging.DEBUG)
        if not log.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter(f"[egcompile {topic.strip()}] %(message)s"))
            log.addHandler(handler)
