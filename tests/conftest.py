"""What tests of all rooms ask of the host."""

from __future__ import annotations

import shutil
import subprocess

import pytest


@pytest.fixture(scope="session")
def bubblewrap() -> None:
    """Skip, with the reason, where the host has no bubblewrap or lets it make no name spaces. Asks bubblewrap itself, not our sandbox."""
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed (apt-get install bubblewrap)")
    tried = subprocess.run(["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"bubblewrap can make no name spaces here: {tried.stderr.strip()}")
