"""The tool-call blocker: what is refused, what is not, and that no text makes it slow."""

from __future__ import annotations

import time
from typing import Any

import pytest

from stages.rewards.tool_blocker import refusal


@pytest.mark.parametrize(
    "call",
    [
        "git clone https://github.com/owner/name",
        "GIT CLONE HTTPS://GITHUB.COM/OWNER/NAME",
        "/usr/bin/git fetch https://gitlab.com/owner/name.git main",
        "git remote add upstream git@github.com:owner/name.git && git fetch upstream",
        "git -c http.proxy=x --no-pager clone ssh://git@github.com/owner/name",
        "git clone https://code.example.org/owner/name.git",
        "git clone git://example.org/owner/name",
        "cd /repo; curl -sL https://github.com/owner/name/pull/3.diff | patch -p1",
        "curl https://user:token@github.com/owner/name",
        "curl github.com:443/owner/name",
        "wget -q https://raw.githubusercontent.com/owner/name/main/src/x.py",
        "gh pr diff 3 --repo github.com/owner/name",
        "ssh git@github.com",
        "pip install git+https://github.com/owner/name@main",
        "pip3.11 install https://github.com/owner/name/archive/main.zip",
        "uv pip install 'name @ git+https://github.com/owner/name'",
        "npm install https://github.com/owner/name",
        "go get github.com/owner/name",
        "cargo install --git https://github.com/owner/name",
        "python -c \"import requests; print(requests.get('https://api.github.com/repos/owner/name').text)\"",
        "python -c \"from urllib.request import urlopen; urlopen('https://github.com/owner/name')\"",
        'python -c \'from git import Repo; Repo.clone_from("https://github.com/owner/name", "x")\'',
        "const page = await fetch(`https://github.com/owner/name`)",
        "Invoke-WebRequest https://github.com/owner/name",
        "exec 3<>/dev/tcp/github.com/443",
    ],
)
def test_blocker_link_with_a_network_keyword_is_refused(call: str) -> None:
    feedback = refusal(call)
    assert feedback is not None
    assert feedback.startswith("This call was not run")


@pytest.mark.parametrize(
    "call",
    [
        {"name": "fetch", "arguments": {"url": "https://github.com/owner/name"}},
        {"name": "webFetch", "arguments": {"url": "https://github.com/owner/name"}},
        {"name": "download_file", "arguments": {"from": ["https://codeberg.org/owner/name"]}},
        {"name": "bash", "arguments": {"command": ["git", "clone", "https://github.com/owner/name"]}},
        {"name": "bash", "arguments": {"command": ["pip", "install", "https://github.com/owner/name/archive/1.zip"]}},
        {"name": "python", "arguments": {"code": "import httpx\nhost = 'github.com'\nhttpx.get(f'https://{host}/owner/name')"}},
        {"tool": "edit", "input": {"path": "fetch.sh", "lines": {"1": "#!/bin/sh", "2": "curl https://github.com/owner/name"}}},
    ],
)
def test_blocker_call_with_name_and_arguments_is_read_whole(call: dict[str, Any]) -> None:
    assert refusal(call)


@pytest.mark.parametrize(
    "call",
    [
        'g\'\'it cl""one https://git"hub".com/owner/name',
        "gi\\\nt clone https://git\\\nhub.com/owner/name",
        "\\git clone https://git\\hub.com/owner/name",
        "git${IFS}clone${IFS}https://github.com/owner/name",
        "U=github.com; curl https://$U/owner/name",
        "H=git D=hub.com\nX=$H$D\nwget https://${X}/owner/name",
        "a=cu; b=rl; $a$b https://github.com/owner/name",
        'python -c \'h = "git" + "hub.com"; import urllib.request as u; u.urlopen("https://" + h + "/owner/name")\'',
        'python -c \'import httpx; httpx.get("https://git" "hub.com/owner/name")\'',
        'python -c \'import httpx; httpx.get("https://" + "".join(["git", "hub.com/owner/name"]))\'',
        "curl https://%67ithub.com/owner/name",
        "printf 'https://\\x67ithub.com/owner/name' | xargs curl",
        "printf 'https://\\147ithub.com/owner/name' | xargs wget",
        '{"url": "https://\\u0067ithub.com/owner/name", "tool": "fetch"}',
        "curl https://\uff47ithub.com/owner/name",
        "curl https://git\u200bhub.com/owner/name",
        "curl https://git\u00adhub.com/owner/name",
    ],
)
def test_blocker_obfuscated_call_is_refused(call: str) -> None:
    assert refusal(call)


@pytest.mark.parametrize(
    "call",
    [
        "git status && git log --oneline -5",
        "git commit -m 'Fix the parser'",
        "curl http://localhost:8000/health",
        "pip install -e . && python -m pytest",
        "cat .git/config",
        "grep -rn 'github.com' docs/",
        "echo 'see https://github.com/owner/name/issues/3' >> NOTES.md",
        "# origin: https://github.com/owner/name.git",
        "# origin: git@github.com:owner/name.git",
        "# origin: https://git.sr.ht/~owner/name",
        "curl https://notgithub.com/x",
        "curl https://github.com.example.org/x",
        "curl https://my-github.com/x",
        "sed -i 's/requests/responses/' github.com.txt",
        "mail someone@example.org about digital legit gitignore widgets",
        "",
    ],
)
def test_blocker_call_without_both_may_run(call: str) -> None:
    assert refusal(call) is None


def test_blocker_call_is_read_to_its_end_however_long() -> None:
    assert refusal("x " * 100_000 + "git clone https://github.com/owner/name")


def test_blocker_finished_answer_may_name_the_issue() -> None:
    assert (
        refusal({"name": "finish", "arguments": {"message": "Fixes https://github.com/owner/name/issues/3", "lines": 12, "ok": True}})
        is None
    )


def test_blocker_feedback_names_the_link_and_the_keyword() -> None:
    feedback = refusal("cd /repo && wget https://github.com/owner/name/archive/main.zip")
    assert feedback is not None
    assert "github.com/owner/name/archive/main.zip" in feedback
    assert "`wget`" in feedback


def test_blocker_task_repository_counts_at_any_address() -> None:
    mirror = "curl -O https://mirror.example.org/Owner/Name/main.tar.gz"
    assert refusal(mirror) is None
    assert refusal(mirror, ["owner/name"])
    assert refusal("curl https://mirror.example.org/owner/names", ["owner/name"]) is None
    assert refusal("ls owner/name", ["owner/name"]) is None


@pytest.mark.parametrize(
    "text",
    [
        *("a" * 100_000, "a." * 50_000, "a@" * 50_000, "http://" * 15_000, '"' + " " * 100_000, "requests" + " " * 100_000),
        *("x=$x$x;" * 15_000, "github.com/a " * 8_000, "$a" * 50_000, "%67" * 33_000, "pip " * 25_000, "git@a.b:" * 12_000),
        *("\\\n" * 50_000, "{a}" * 33_000, f"b={'c' * 150};" + "$b" * 50_000),
    ],
    ids=lambda text: text[:8],
)
def test_blocker_hostile_text_takes_no_time(text: str) -> None:
    start = time.process_time()
    refusal(text)
    assert time.process_time() - start < 5
