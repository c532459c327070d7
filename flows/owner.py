"""Which process owns a run: a name that no later process can have, and whether its owner is still there."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def process_identity(like: str = "") -> str:
    """`host:pid:start` of this process, or of the process that the text names; other text when that process is gone."""
    pid = like.split(":")[1] if like else str(os.getpid())
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        fields = ["gone"]
    started = "gone" if fields[0] in {"gone", "Z", "X"} else fields[19]  # Z, X: it has ended, only its status is left
    return f"{socket.gethostname()}:{pid}:{started}"


def is_gone(owner: str) -> bool:
    """Whether `host:pid:start` names a process of this machine that has ended. Of another machine's process nobody can say: False."""
    return owner.startswith(f"{socket.gethostname()}:") and owner.count(":") == 2 and owner != process_identity(owner)
