"""The tool-call blocker: an agent may not fetch the solution from the repository that its task was made of.

Qwen3-Coder-Next (arXiv 2603.00729): a tool call that holds a repository link together with a network keyword is
refused, and the agent is told why. It is a rule of the environment and no reward; a sandbox without network is the wall, this
is the sign on it, from which an agent learns to work on instead of trying doors.

Read is what a shell or an interpreter would: split words, joined texts, escapes, braces, variables of the same call. Behind a
command of version control every address is a repository's, and a forge's own tool needs none; commands of git that reach no
other host are no network keyword. Not read are encodings that need a program (base64, character arithmetic, compression),
link shorteners, bare addresses, and a link that stands in one call and its use in another.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import unquote

_FORGES = (
    "github.com githubusercontent.com github.dev githubassets.com github.io gitlab.com bitbucket.org codeberg.org gitee.com "
    "sr.ht gitea.com sourceforge.net salsa.debian.org git.kernel.org savannah.gnu.org launchpad.net notabug.org "
    "framagit.org pagure.io repo.or.cz googlesource.com heptapod.net invent.kde.org dev.azure.com visualstudio.com "
    "hub.darcs.net ghproxy.com kkgithub.com gitclone.com fastgit.org fastgit.xyz githack.com jsdelivr.net git.io "
    "svn.apache.org"
)
_FORGE = re.compile(
    rf"(?<![\w.-])(?:[\w.-]{{1,64}}@)?(?:(?:[\w-]{{1,63}}\.){{0,4}}(?:{'|'.join(map(re.escape, _FORGES.split()))})"
    r"|(?:git|gitlab|gitea|forgejo|gogs|cgit)\.(?:[\w-]{1,63}\.){1,4}(?:com|org|net|edu|gov|info|dev|app|cloud|[a-z]{2}))"
    r"(?![\w(-]|\.\w)(?::\d+)?[^\s;|&<>(),\]}]*"
)
_LINK = re.compile(
    r"(?:git|ssh|https?|git\+\w{1,9})://[^\s;|&<>(),\]}]{1,300}\.git\b[^\s;|&<>(),\]}]*"  # https://host/owner/name.git
    r"|\b(?:git|ssh|svn|svn\+\w{1,9}|bzr|hg)://[^\s;|&<>(),\]}]+"
    r"|\b(?:git|hg|svn)@[\w.-]{1,100}:[\w.~/-]+"  # git@host:owner/name
    r"|\b[\w.-]{1,64}@[\w.-]{1,100}:[\w.~/-]{1,200}\.git\b"
    r"|\b(?:github|gitlab|bitbucket|codeberg|gist|sourcehut):[\w.~-]{1,100}/[\w.-]+"  # github:owner/name
)
_LOCAL_GIT = (
    "add am annotate apply bisect blame branch cat-file check-attr check-ignore checkout cherry cherry-pick clean commit "
    "config count-objects describe diff diff-tree difftool fsck gc grep help init log ls-files ls-tree merge merge-base mv "
    "name-rev notes rebase reflog reset restore rev-list rev-parse revert rm shortlog show show-ref stash status switch "
    "symbolic-ref tag version whatchanged worktree"
)
"""Commands of git that reach no other host; any other use of it is a network keyword."""
_GIT = (
    r"(?<![a-z0-9.])git(?![a-z0-9])(?!/|(?:\s{1,9}-c\s{1,9}\S{1,200}|\s{1,9}--?[a-z][\w-]*(?:=\S{1,200})?){0,8}\s{1,9}"
    rf"(?:{_LOCAL_GIT.replace(' ', '|')})(?![\w-]))"
)
_COMMANDS = (
    "glab hub svn hg jj bzr cvs darcs fossil gix curl wget wget2 aria2c axel httpie xh lynx w3m links2 elinks nc ncat "
    "netcat socat telnet ssh scp sftp sshfs mosh rsync rclone ftp tftp lftp smbclient s_client certutil bitsadmin "
    "bitstransfer iwr irm webrequest restmethod webclient xmlhttprequest axios urlopen urlretrieve urllib urllib2 urllib3 "
    "httpx aiohttp pycurl pygit2 gitpython dulwich ftplib telnetlib xmlrpc httpconnection httpsconnection open_connection "
    "create_connection get_server_certificate lwp open-uri file_get_contents fsockopen install_github goproxy chromium "
    "playwright selenium easy_install gh"
)
_ACTIONS = ("fetch", "download", "clone", "browser", "browse", "navigate", "crawl")
"""Names of tools and functions, so not of files."""
_NO_FILE = r"(?![a-z0-9]|\.(?:md|rst|txt|py|js|ts|go|c|h|html|json|ya?ml|toml)\b)"
_PHRASES = (
    r"\bpip[\d.]*(?:\s{1,9}-\S{1,99}){0,8}\s+(?:install|download|wheel)\b|\b(?:pipx|pipenv|poetry|conda|mamba|brew)\s+\w+|\buvx\b",
    r"\buv(?:\s{1,9}-\S{1,99}){0,8}\s+(?:pip|add|tool|run|sync)\b|\b(?:apt|apt-get|dnf|yum|apk|pacman)\s+\S+|\bnix(?:-\w+)?\s+\S+",
    r"\b(?:npm|pnpm|yarn|bun|deno)\s+\w+|\bnpx\b|\bgo\s+(?:get|install|mod)\b|\bgo\s+run\s+\S{1,200}@|\bgem\s+install\b",
    r"\bcargo\s+(?:install|add|fetch|update)\b|\bcomposer\s+\w+|\b(?:docker|podman|buildah)\s+(?:build|pull|run|buildx)\b",
    r"\bimport\s+requests\b|\bfrom\s+requests\b|\brequests\s*\.\s*\w+|\brequests\s*\[|\b(?:__import__|import_module)\s*\(",
    r"\bhttp\s*\.\s*client\b|\bsocket\s*\.\s*\w+|\b(?:import|from)\s+socket\b|/dev/(?:tcp|udp)/|\bio::socket\b|lwp::|\bnet(?:::|/)https?\b",
    r"\buri\s*\.\s*open\b|\bhttps?\W{0,3}\.\s*(?:get|request)\b|\bread_(?:csv|html|json|table|parquet|excel)\s*\(|\btorch\s*\.\s*hub\b",
)
_KEYWORD = re.compile(
    rf"{_GIT}|(?<![a-z0-9])(?:{_COMMANDS.replace(' ', '|')})(?![a-z0-9])"
    rf"|(?<![a-z0-9])(?<!def )(?:{'|'.join(_ACTIONS)}){_NO_FILE}"
    rf"|{'|'.join(_PHRASES)}"
)
_FORGE_TOOL = re.compile(
    r"(?<![\w.-])(?:gh|glab)(?:\s{1,9}--?[a-z][\w-]*(?:=\S{1,99})?){0,4}"
    r"\s{1,9}(?:repo|pr|mr|api|issue|release|search|browse|gist|run|workflow)\b[^;|&\n]{0,60}"
    r"|\bgo\s{1,9}run\s{1,9}[\w-]{1,60}\.[\w./-]{1,200}@\S{1,60}"
)
"""They need no link, or hold it, and reach its forge by themselves."""
_VERSION_CONTROL = re.compile(rf"{_GIT}|(?<![a-z0-9.])(?:hg|svn|jj|bzr|cvs|darcs|fossil|gix)(?![a-z0-9])|(?<![a-z0-9])clone{_NO_FILE}")
_ADDRESS = re.compile(
    r"\b\w[\w+]{1,12}(?<!file)://(?!localhost\b|127\.)[^\s;|&<>(),\]}]+|\b[\w.-]{1,64}@[\w.-]{1,100}:[\w.~/-]+"
    r"|\bclone(?:\s{1,9}-\S{1,99}){0,8}\s{1,9}[a-z0-9][\w.-]{1,99}:(?!//)[\w.~/-]+"
)
"""Behind a command of version control it is a repository's, whatever its host."""
_ASSIGNMENT = re.compile(r"(?:^|[\s;&(])([a-z_]\w*)\s*=\s*([^\s;&|]+)")
_BRACES = re.compile(r"([^\s{}]{0,60})\{([^{}\s,]{0,60}(?:,[^{}\s,]{0,60}){1,5})\}([^\s{}]{0,60})")
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
        keyword = _KEYWORD.search(rest) if link else None
        if not keyword:
            link, keyword = _by_its_command(plain)
        if link and keyword:
            return (
                f"This call was not run: it holds a link to a repository ({link[0][:80]}) together with `{keyword[0][:40]}`. "
                "The task is to be solved from the files at hand; fetching the repository, its history or its fixes from "
                "elsewhere is not allowed. If you only wanted to write the link down, leave out the network command."
            )
    return None


def _by_its_command(plain: str) -> tuple[re.Match[str] | None, re.Match[str] | None]:
    """A link that is one by the command it stands behind, and that command; nothing where there is none."""
    if tool := _FORGE_TOOL.search(plain):
        return tool, tool
    for command in re.split(r"[;|&\n]", plain):
        if (address := _ADDRESS.search(command)) and (keyword := _VERSION_CONTROL.search(_ADDRESS.sub(" ", command))):
            return address, keyword
    return None, None


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
    visible = "".join(
        character for character in unicodedata.normalize("NFKC", text).replace("\u3002", ".") if unicodedata.category(character) != "Cf"
    )
    apart = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", visible)
    return list(dict.fromkeys((visible.lower(), apart.lower(), _unwrapped(visible.lower()))))


def _unwrapped(text: str) -> str:
    """Without line continuations, quotes, escapes, percent signs and variables."""
    text = re.sub(r"\\\r?\n", "", text)
    text = re.sub(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\([0-7]{3})", _character, text)
    text = unquote(text).lower()
    text = re.sub(r"\$\{?ifs\}?", " ", text)
    text = re.sub(r"""["'](?:\s{0,9}[+,]\s{0,9}\w{0,2}|\s{1,9}\w{0,2})?["']""", "", text)  # "git" + "hub.com", "git" f"hub.com", gi''t
    text = re.sub(r"""["'`\\]""", "", text)
    text = re.sub(r"\[(\w)\]", r"\1", text)  # gith[u]b
    text = _BRACES.sub(lambda word: " ".join(word[1] + part + word[3] for part in word[2].split(",")), text)  # git{hub,lab}.com
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
