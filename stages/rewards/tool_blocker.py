"""The tool-call blocker: an agent may not fetch the solution from the repository that its task was made of.

Qwen3-Coder-Next (arXiv 2603.00729): a tool call that holds a repository link together with a network keyword is
refused, and the agent is told why. It is a rule of the environment and no reward; a sandbox without network is the wall, this
is the sign on it, from which an agent learns to work on instead of trying doors.

Read is what a shell or an interpreter would: split words, joined texts, escapes, variables of the same call. Not
read are encodings that need a program (base64, character arithmetic, compression), link shorteners, bare
addresses, and a link that stands in one call and its use in another.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import unquote

_FORGES = (
    *("github.com", "githubusercontent.com", "github.dev", "githubassets.com", "gitlab.com", "bitbucket.org", "codeberg.org", "gitee.com"),
    *("sr.ht", "gitea.com", "sourceforge.net", "salsa.debian.org", "git.kernel.org", "savannah.gnu.org", "launchpad.net", "ghproxy.com"),
)
_FORGE = re.compile(
    rf"(?<![\w.-])(?:[\w.-]{{1,64}}@)?(?:[\w-]{{1,63}}\.){{0,4}}(?:{'|'.join(map(re.escape, _FORGES))})"
    r"(?![\w-]|\.\w)(?::\d+)?[^\s;|&<>(),\]}]*"
)
_LINK = re.compile(
    r"(?:git|ssh|https?|git\+\w{1,9})://[^\s;|&<>(),\]}]{1,300}\.git\b[^\s;|&<>(),\]}]*"  # https://host/owner/name.git
    r"|\bgit://[^\s;|&<>(),\]}]+"
    r"|\b[\w.-]{1,64}@[\w.-]{1,100}\.\w{1,20}:[\w.~/-]+"  # git@host:owner/name
)
_COMMANDS = (
    *(
        "git",
        "gh",
        "glab",
        "hub",
        "svn",
        "hg",
        "curl",
        "wget",
        "wget2",
        "aria2c",
        "axel",
        "httpie",
        "xh",
        "lynx",
        "w3m",
        "links2",
        "elinks",
    ),
    *("nc", "ncat", "netcat", "socat", "telnet", "ssh", "scp", "sftp", "rsync", "ftp", "lftp", "fetch", "urlopen", "urlretrieve", "urllib"),
    *(
        "urllib2",
        "urllib3",
        "httpx",
        "aiohttp",
        "pycurl",
        "pygit2",
        "gitpython",
        "dulwich",
        "axios",
        "xmlhttprequest",
        "webclient",
        "iwr",
        "irm",
    ),
    *(
        "webrequest",
        "restmethod",
        "lwp",
        "download",
        "clone",
        "browser",
        "browse",
        "navigate",
        "chromium",
        "playwright",
        "selenium",
        "crawl",
    ),
)
_PHRASES = (
    r"\bpip[\d.]*\s+(?:install|download|wheel)|\buv\s+(?:pip|add|tool|run)|\b(?:pipx|poetry|conda|mamba)\s+\w+|\buvx\b",
    r"\b(?:npm|pnpm|yarn|bun)\s+\w+|\bnpx\b|\bgo\s+(?:get|install|mod)\b|\bcargo\s+(?:install|add|fetch|update)\b|\bgem\s+install\b|\bcomposer\s+\w+",
    r"\bimport\s+requests\b|\bfrom\s+requests\b|\brequests\s*\.\s*\w+|\bhttp\s*\.\s*client\b|\bsocket\s*\.\s*\w+|/dev/(?:tcp|udp)/",
)
_KEYWORD = re.compile(rf"(?<![a-z0-9.])git(?![a-z0-9])|(?<![a-z0-9])(?:{'|'.join(_COMMANDS)})(?![a-z0-9])|{'|'.join(_PHRASES)}")
_ASSIGNMENT = re.compile(r"(?:^|[\s;&(])([a-z_]\w*)\s*=\s*([^\s;&|]+)")
_ROUNDS = 5
_GROWTH = 10


def refusal(tool_call: str | Mapping[str, Any], repositories: Collection[str] = ()) -> str | None:
    """What to answer to a tool call in place of running it, or None when it may run.

    `tool_call` is its text, or its name and arguments in any nesting. `repositories` are the task's own, as
    `owner/name`: with a network keyword they count as links at any address, so that a mirror helps nobody.
    """
    text = tool_call if isinstance(tool_call, str) else "\n".join(_texts(tool_call))
    patterns = [_LINK, _FORGE, *(re.compile(rf"(?<![\w-]){re.escape(name.lower())}(?![\w-])") for name in repositories)]
    for plain in _readings(text):
        rest, link = plain, None
        for pattern in patterns:
            link = link or pattern.search(rest)
            rest = pattern.sub(" ", rest)  # a word of the link itself is no keyword
        if link and (keyword := _KEYWORD.search(rest)):
            return (
                f"This call was not run: it holds a link to a repository ({link[0][:80]}) together with `{keyword[0]}`. "
                "The task is to be solved from the files at hand; fetching the repository, its history or its fixes from "
                "elsewhere is not allowed. If you only wanted to write the link down, leave out the network command."
            )
    return None


def _texts(value: object) -> list[str]:
    """Every text in a tool call, keys included."""
    if isinstance(value, Mapping):
        return [text for key, inner in value.items() for text in (str(key), *_texts(inner))]
    if isinstance(value, list | tuple):
        parts = [text for inner in value for text in _texts(inner)]
        return [*parts, " ".join(parts)]  # ["git", "clone", ...] is one command
    return [value if isinstance(value, str) else json.dumps(value, default=str)]


def _readings(text: str) -> list[str]:
    """The text in lower case: as written, with the words of names like fetchUrl apart, and as a shell or an interpreter reads it."""
    visible = "".join(character for character in unicodedata.normalize("NFKC", text) if unicodedata.category(character) != "Cf")
    apart = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", visible)
    return list(dict.fromkeys((visible.lower(), apart.lower(), _unwrapped(visible.lower()))))


def _unwrapped(text: str) -> str:
    """Without line continuations, quotes, escapes, percent signs and variables."""
    text = re.sub(r"\\\r?\n", "", text)
    text = re.sub(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\([0-7]{3})", _character, text)
    text = unquote(text).lower()
    text = re.sub(r"\$\{?ifs\}?", " ", text)
    text = re.sub(r"""["']\s{0,9}[+,]?\s{0,9}\w{0,2}["']""", "", text)  # "git" + "hub.com", "git" f"hub.com", gi''t
    text = re.sub(r"""["'`\\]""", "", text)
    longest = _GROWTH * len(text)
    for _ in range(_ROUNDS):
        following = _with_values(text, dict(_ASSIGNMENT.findall(text)))
        if following == text or len(following) > longest:
            break
        text = following
    return text


def _with_values(text: str, values: Mapping[str, str]) -> str:
    """$name, ${name} and {name} replaced by what was assigned to them in the same call."""
    return re.sub(r"\$?\{(\w+)\}|\$(\w+)", lambda match: values.get(match[1] or match[2], match[0])[:200], text)


def _character(match: re.Match[str]) -> str:
    code = int(match[1] or match[2], 16) if match[1] or match[2] else int(match[3], 8)
    return chr(code).lower()
