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
        "git -C /repo clone https://example.org/owner/name",
        "git clone https://example.org/owner/name",
        "git clone --depth 1 someone@example.org:owner/name",
        "git clone example.org:owner/name",
        "git fetch ssh://example.org/owner/name && git merge FETCH_HEAD",
        "git ls-remote https://example.org/owner/name",
        "git submodule add https://example.org/owner/name",
        "git status; git pull https://example.org/owner/name main",
        "git commit -am wip && git fetch https://github.com/owner/name",
        "git -c alias.status=clone -C /repo up https://github.com/owner/name",
        "hg clone https://example.org/owner/name",
        "svn co svn://example.org/name",
        "gh pr diff 3",
        "gh --verbose api repos/owner/name/pulls",
        "glab mr list",
        "nix run github:owner/name",
        "npm install github:owner/name",
        "go run github.com/owner/name@latest",
        "pip -q install https://github.com/owner/name/archive/1.zip",
        "docker build https://github.com/owner/name.git",
        "curl https://gitlab.example.org/owner/name/-/archive/1.tar.gz",
        "curl https://cdn.jsdelivr.net/gh/owner/name@main/x.py",
        "openssl s_client -connect github.com:443",
        "perl -MLWP::Simple -e 'getprint(\"https://github.com/owner/name\")'",
        "perl -MIO::Socket -e 'IO::Socket::INET->new(\"github.com:443\")'",
        "ruby -ropen-uri -e 'puts URI.open(\"https://github.com/owner/name\").read'",
        "php -r 'echo file_get_contents(\"https://github.com/owner/name\");'",
        'node -e \'require("https").get("https://github.com/owner/name")\'',
        "python -c 'from socket import *; socket().connect((\"github.com\", 443))'",
        "python -c 'import asyncio; asyncio.open_connection(\"github.com\", 443)'",
        "python -c 'import pandas; pandas.read_csv(\"https://raw.githubusercontent.com/owner/name/x.csv\")'",
        'python -c \'__import__("requests").get("https://github.com/owner/name")\'',
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
        "c'u'rl https://github.com/owner/name",
        "'w'get https://g'i'thub.com/owner/name",
        "curl https://git{hub,lab}.com/owner/name",
        "curl https://gith[u]b.com/owner/name",
        "curl https://github\u3002com/owner/name",
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
        "git commit -m 'Fix #3, see https://github.com/owner/name/issues/3'",
        "git add README.md && git commit -qm 'Link to https://github.com/owner/name'",
        "git -C /repo --no-pager log --grep=github.com/owner/name",
        "git grep -n https://github.com -- docs",
        "git config user.email bot@users.noreply.github.com",
        "git checkout -b fix && sed -i 's#http://github.com#https://github.com#' README.md",
        "git diff | grep github.com",
        "cat .git/config | grep github.com",
        "git fetch origin main:main",
        "git pull --rebase",
        "git clone /srv/name copy",
        "git clone file:///srv/name",
        "git clone http://localhost:3000/owner/name",
        "git log > out.txt; curl http://localhost:8000/health",
        "scp x user@example.org:/tmp",
        "sed -i 's#https://github.com/a#https://github.com/b#' docs/download.md",
        "python -m pytest tests/test_clone.py # https://github.com/owner/name/issues/3",
        "go test github.com/owner/name/pkg && go build ./...",
        "class Session:\n    # See https://github.com/owner/name\n    def fetch(self): ...",
        "cat gh.txt | grep pr",
        'python -c \'import git; git.Repo.init("x"); print(git.repo.fun.is_git_dir("."), git.cmd.Git.USE_SHELL, git.db.is_in)\'',
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
        *(
            "git -a " * 15_000,
            "git -c x " * 12_000,
            "git " * 25_000 + "https://a.b/c",
            "clone -a " * 12_000,
            "gh -a " * 15_000,
            "a,{" * 30_000,
        ),
        *("{a,b,c}" * 15_000, "git.a." * 15_000, "github:" * 15_000, "uv -" * 25_000, "https://a.b " * 8_000, "go run a." * 10_000),
        *("\\\n" * 50_000, "{a}" * 33_000, f"b={'c' * 150};" + "$b" * 50_000),
    ],
    ids=lambda text: text[:8],
)
def test_blocker_hostile_text_takes_no_time(text: str) -> None:
    start = time.process_time()
    refusal(text)
    assert time.process_time() - start < 5
