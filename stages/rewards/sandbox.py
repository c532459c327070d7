"""Untrusted programs run here and nowhere else: one Python process behind bubblewrap, or an error.

A program gets a name space of its own for users, processes, network, IPC and host name; a read-only root
with the shared libraries and Python's standard library; an empty `/tmp` in memory; no environment, no `/proc`,
no device. It sees its text as `/program.py` and its input on standard input (and as `/dev/stdin`); input, output
and program live in anonymous memory, so that nothing is left on disk. It is process 1 of its name space and
stays alone there: a seccomp filter lets it start threads but no process, open no socket and change no priority. So the
memory limit of the process is that of the whole sandbox. Threads and files cost the kernel memory that no limit of a process
counts; they are counted from outside, some ten times a second, and a program with too many is ended.
Programs that need more than the standard library, `subprocess`, `multiprocessing` or `/proc` fail.

Everything inside dies with the sandbox, and the sandbox with its parent. Where a host cannot give all of this,
no program is run: there is no second way.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import platform
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from stages.errors import RewardError

_MIB = 1 << 20
_MESSAGE_BYTES = 2000
_NOBODY = 65534
_LAST_SECONDS = 5.0
_TICK_S = 0.1
_KILLED = 128 + signal.SIGKILL
_SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN}


class SandboxError(RewardError):
    """No program could be run, or the host ended it: the sandbox failed, not the program."""


class Limits(NamedTuple):
    """What a program may use. Past a limit it ends, and the program is at fault."""

    cpu_s: int = 4
    """Processor time of all its threads, with Python's own start of some 0.02 s."""
    wall_s: float = 8.0
    memory_mib: int = 512
    """Address space."""
    tmp_mib: int = 64
    """All files in `/tmp` together; they count besides `memory_mib`."""
    file_mib: int = 16
    """One file, and so what is written to each of the standard streams before it is cut off."""
    output_kib: int = 1024
    """Standard output."""
    open_files: int = 64
    threads: int = 256
    files: int = 10_000
    """Files, folders and links in `/tmp`."""


DEFAULT_LIMITS = Limits()


class Outcome(NamedTuple):
    """How a program ended."""

    fault: str
    """Empty when it ended by itself with status 0 and within its limits; else what it did."""
    output: str
    """Its standard output, cut after `output_kib`."""
    errors: str
    """The end of its standard error."""
    seconds: float
    """Wall clock, with the start of the sandbox."""


def run_program(program: str, stdin: str = "", limits: Limits = DEFAULT_LIMITS) -> Outcome:
    """Run a Python program on `stdin` in a sandbox of its own and wait for its end.

    Raises SandboxError when this host cannot run it or ended it: no bubblewrap, no user name spaces, out
    of processes or memory, or so busy that the program waited for a core for the time that it lacked.
    """
    if sys.platform != "linux" or not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        raise _refusal("this system is not Linux, or its Python was built for an older one")
    start, oom_kills = time.monotonic(), _oom_kills()
    with ExitStack() as files:
        try:
            ready, output, errors = (_memory_file(files) for _ in range(3))
            alive, held = os.pipe()
            files.callback(os.close, held)
            files.callback(os.close, alive)
            process = _start(files, program, stdin, limits, ready=ready, alive=alive, output=output, errors=errors)
            try:
                watch = os.pidfd_open(process.pid)
            except OSError:
                process.kill()
                process.wait()
                raise
            files.callback(os.close, watch)
        except OSError as error:
            if error.errno in _SHORTAGES:
                raise SandboxError(
                    f"a program could not be started in its sandbox: {error.strerror}; "
                    "free memory, processes or open files (ulimit -n), or run fewer graders at once"
                ) from error
            raise _refusal(error.strerror or str(error)) from error
        finished, excess, waited_s = False, "", 0.0
        try:
            finished, excess = _watched(process.pid, watch, ready, limits)
            waited_s = 0.0 if finished or excess else _waited_for_core(process.pid)
        finally:
            if not finished:
                _kill(process, watch)
            _, wait_status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(wait_status)
        seconds, cpu_s = time.monotonic() - start, usage.ru_utime + usage.ru_stime
        message = _printable(os.pread(errors, _MESSAGE_BYTES, max(0, os.fstat(errors).st_size - _MESSAGE_BYTES)).decode("utf-8", "replace"))
        if not os.fstat(ready).st_size:
            raise _refusal(
                message or (f"bwrap ended with status {process.returncode}" if finished else f"not up after {limits.wall_s:g} s")
            )
        written = os.pread(output, limits.output_kib * 1024 + 1, 0)
    fault = ""
    if waited_s > max(limits.wall_s - limits.cpu_s, limits.wall_s / 2):
        raise SandboxError(
            f"a program waited {waited_s:.1f} of its {limits.wall_s:g} s for a free core, so it has not failed; "
            "run fewer graders at once, or raise the wall-clock limit"
        )
    if excess:
        fault = excess
    elif not finished:
        fault = f"not finished after {limits.wall_s:g} s"
    elif process.returncode < 0 or (process.returncode == _KILLED and _oom_kills() > oom_kills):
        raise SandboxError(
            f"a program was ended after {seconds:.1f} s by the kernel's out-of-memory killer or from outside; "
            "run fewer graders at once, or lower the memory limit"
        )
    elif process.returncode == _KILLED and cpu_s > limits.cpu_s / 2:  # ticks, by which the limit goes, count more than was used under load
        fault = f"more than {limits.cpu_s} s of processor time"
    elif process.returncode:
        fault = f"status {process.returncode}: {message.splitlines()[-1][:200] if message else 'no message'}"
    elif len(written) > limits.output_kib * 1024:
        fault = f"more than {limits.output_kib} KiB of output"
    return Outcome(fault, written[: limits.output_kib * 1024].decode("utf-8", "replace"), message, seconds)


@functools.cache
def require_sandbox() -> None:
    """Return when this host can run untrusted programs; raise SandboxError with the reason and the remedy when it cannot.

    A program is run that tries what it must not be able to do. Costs one run, once in a process.
    """
    outcome = run_program(_PROBE)
    if outcome.fault or outcome.output.strip() != "closed":
        raise _refusal(f"a test program found it open: {outcome.fault or outcome.output.strip()}")


def _start(
    files: ExitStack, program: str, stdin: str, limits: Limits, *, ready: int, alive: int, output: int, errors: int
) -> subprocess.Popen[bytes]:
    """Start bubblewrap. The program is process 1 in its name space and ends when bwrap does.

    `ready` is written when it begins; it does not begin when the other end of `alive` is gone, which bwrap overlooks while it starts.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise _refusal("the command `bwrap` (bubblewrap) is not there")
    rules = _memory_file(files, _seccomp_filter(platform.machine()))
    text, given, given_as_file, null = (_memory_file(files, content.encode("utf-8", "replace")) for content in (program, stdin, stdin, ""))
    command = [
        bwrap,
        *("--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
        *f"--uid {_NOBODY} --gid {_NOBODY} --hostname sandbox --cap-drop ALL --new-session --die-with-parent --as-pid-1".split(),
        *f"--seccomp {rules} --setenv PYTHONHASHSEED 0".split(),
        *_python_mounts(),
        *f"--file {text} /program.py --file {given_as_file} /dev/stdin --bind-data {null} /dev/null".split(),
        *f"--perms 1777 --size {limits.tmp_mib * _MIB} --tmpfs /tmp --remount-ro / --chdir /tmp --".split(),
        *(_python(), "-s", "-S", "-P", "-B", "-X", "utf8", "-c", _BOOTSTRAP, str(ready), str(alive), *_rlimits(limits)),
    ]
    passed = (rules, text, given_as_file, null, ready, alive)
    return subprocess.Popen(command, stdin=given, stdout=output, stderr=errors, env={}, pass_fds=passed)  # noqa: S603 - no shell


def _refusal(reason: str) -> SandboxError:
    return SandboxError(
        f"no sandbox on this host: {reason}. Untrusted code runs only behind bubblewrap 0.7 or newer, on Linux (x86-64 or arm64) with user "
        "name spaces; install it (Debian, Ubuntu: apt-get install bubblewrap), and allow user name spaces where a container or the kernel "
        "forbids them"
    )


def _memory_file(files: ExitStack, content: bytes | None = None) -> int:
    """A file without a name; with content it can no longer be changed."""
    fd = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    files.callback(os.close, fd)
    if content is not None:
        with os.fdopen(fd, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(fd, 0, os.SEEK_SET)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return fd


def _ends(watch: int, timeout_s: float) -> bool:
    """Whether the process of a pidfd ends within the time."""
    poll = select.poll()
    poll.register(watch, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _watched(bwrap: int, watch: int, ready: int, limits: Limits) -> tuple[bool, str]:
    """Whether a program ends within its wall clock, and of what it had too much when it must be ended before.

    Until `ready` is written its process is still bwrap's, and sees the host's files.
    """
    end = time.monotonic() + limits.wall_s
    while (left := end - time.monotonic()) > 0:
        if _ends(watch, min(left, _TICK_S)):
            return True, ""
        if os.fstat(ready).st_size and (excess := _excess(_program_of(bwrap), limits)):
            return False, excess
    return False, ""


def _excess(program: int | None, limits: Limits) -> str:
    """Of what a program has too much; empty for nothing, and where the kernel does not say."""
    with suppress(OSError):
        if os.stat(f"/proc/{program}/task").st_nlink - 2 > limits.threads:
            return f"more than {limits.threads} threads"
        tmp = os.statvfs(f"/proc/{program}/root/tmp")
        if tmp.f_files - tmp.f_ffree > limits.files:
            return f"more than {limits.files} files"
    return ""


def _printable(text: str) -> str:
    """A program's words without what a terminal would obey."""
    lines = text.strip().splitlines()
    return "\n".join("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line.expandtabs()) for line in lines)


def _program_of(bwrap: int) -> int | None:
    """The process inside the sandbox that a bwrap waits for, by its number outside."""
    try:
        return int(Path(f"/proc/{bwrap}/task/{bwrap}/children").read_text().split()[0])
    except (OSError, IndexError):
        return None


def _waited_for_core(bwrap: int) -> float:
    """Seconds for which the program was ready and no core was free; 0 where the kernel does not say."""
    try:
        return int(Path(f"/proc/{_program_of(bwrap)}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _oom_kills() -> int:
    """Processes that the kernel has killed for lack of memory since it started; 0 where it does not say."""
    with suppress(OSError):
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
        return int(found[1]) if found else 0
    return 0


def _kill(process: subprocess.Popen[bytes], watch: int) -> None:
    """End the program, so that bwrap buries it; bwrap itself, and with it all of the sandbox, when there is none or that does not help."""
    program = _program_of(process.pid)
    if program is not None:
        with suppress(OSError):  # it is gone, or there is no room for another open file
            handle = os.pidfd_open(program)
            try:
                if _program_of(process.pid) == program:  # the number has not been given to another process
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)
    if program is None or not _ends(watch, _LAST_SECONDS):
        process.kill()


@functools.cache
def _python() -> str:
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


@functools.cache
def _python_mounts() -> tuple[str, ...]:
    """Arguments that show Python and the shared libraries at their own places, and nothing else of the host."""
    words: list[str] = []
    for path in ("/lib", "/lib64"):
        words += ("--symlink", os.readlink(path), path) if os.path.islink(path) else ("--ro-bind-try", path, path)
    base = {"installed_base": sys.base_prefix, "base": sys.base_prefix, "platbase": sys.base_prefix, "installed_platbase": sys.base_prefix}
    places = [
        "/usr/lib",
        "/usr/lib64",
        "/etc/ld.so.cache",
        os.path.join(sys.base_prefix, "lib"),
        sysconfig.get_path("stdlib", vars=base),
        _python(),
    ]
    for place in dict.fromkeys(map(os.path.realpath, places)):
        words += ("--ro-bind-try", place, place)
    installed = [sysconfig.get_path("purelib", vars=base), sysconfig.get_path("platlib", vars=base), "/usr/lib/python3/dist-packages"]
    for place in dict.fromkeys(os.path.realpath(path) for path in installed if os.path.isdir(path)):
        words += ("--size", "4096", "--tmpfs", place, "--remount-ro", place)  # an empty folder: what a host has installed decides nothing
    return tuple(words)


def _rlimits(limits: Limits) -> list[str]:
    """Limits as `NAME:value`."""
    values = {
        "CPU": limits.cpu_s,
        "AS": limits.memory_mib * _MIB,
        "FSIZE": limits.file_mib * _MIB,
        "NOFILE": limits.open_files,
        "STACK": 8 * _MIB,
        "CORE": 0,
        "MEMLOCK": 0,
    }
    return [f"{name}:{value}" for name, value in values.items()]


_BOOTSTRAP = """
import builtins, os, resource, sys
def prepare():
    ready, alive, *limits = sys.argv[1:]
    ready, alive = int(ready), int(alive)
    os.set_blocking(alive, False)
    try:
        os.read(alive, 1)
    except BlockingIOError:
        os.close(alive)
    else:
        os._exit(1)
    for limit in limits:
        name, value = limit.split(":")
        kind = getattr(resource, "RLIMIT_" + name)
        resource.setrlimit(kind, (int(value), resource.getrlimit(kind)[1] if name == "STACK" else int(value)))
    builtins.exit = builtins.quit = sys.exit
    sys.argv = ["/program.py"]
    main = sys.modules["__main__"] = type(sys)("__main__")
    main.__builtins__ = builtins
    with open("/program.py", encoding="utf-8") as file:
        text = file.read()
    os.write(ready, b"1")
    os.close(ready)
    return text, main.__dict__
text, names = prepare()
exec(compile(text, "/program.py", "exec"), names)
"""
"""Sets the limits, says that the program begins, and becomes it. A program may raise the limit of its stack within its memory."""

_PROBE = """
import os, socket, threading
def refused(attempt, *arguments):
    try:
        attempt(*arguments)
    except OSError:
        return True
    return False
thread = threading.Thread(target=int)
thread.start()
thread.join()
attempts = {
    "fork": refused(os.fork),
    "socket": refused(socket.socket),
    "priority": refused(os.nice, 1),
    "write": refused(open, "/usr/lib/posttrain-probe", "w"),
    "proc": refused(os.listdir, "/proc"),
}
print("closed" if all(attempts.values()) else [name for name, closed in attempts.items() if not closed])
"""

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column in the table of system calls, and the kernel's name for the architecture."""

_DENIED = {
    # another process
    "fork": (57, None), "vfork": (58, None), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438), "kcmp": (312, 272),
    # its share of the processor
    "setpriority": (141, 140), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122), "ioprio_set": (251, 30),
    # the network, also where name spaces do not reach
    "socket": (41, 198), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    # memory that its limit does not count
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186),
    "mq_open": (240, 180), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    # name spaces, mounts, the kernel itself
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "move_mount": (429, 429), "open_tree": (428, 428), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "open_by_handle_at": (304, 265), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "fanotify_init": (300, 262), "syslog": (103, 116), "personality": (135, 92),
    "modify_ldt": (154, None),
}  # fmt: skip
"""System calls that a program may not make, by their numbers on x86-64 and arm64."""

_DENIED_ARGUMENTS = {
    "clone": ((56, 220), 0, 0x10000, 0),  # CLONE_THREAD: without it a process is started
    "prctl": ((157, 167), 0, 0xFFFFFFFF, 1),  # PR_SET_PDEATHSIG: it would outlive its parent
}
"""System calls that a program may not make when an argument, masked, has a value: numbers, argument, mask, value."""

_CLONE3 = 435


@functools.cache
def _seccomp_filter(machine: str) -> bytes:
    """The filter as an array of `struct sock_filter`. Raises SandboxError for an architecture without a table."""
    if machine not in _ARCHITECTURES:
        raise _refusal(f"no table of system calls for {machine}")
    column, architecture = _ARCHITECTURES[machine]
    load, mask_with, equal, at_least, give = 0x20, 0x54, 0x15, 0x35, 0x06
    allow, deny, absent, kill = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS, 0x80000000
    code = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, kill), (load, 0, 0, 0)]
    code += [(at_least, 0, 1, 0x40000000), (give, 0, 0, deny)]  # x86-64's second table of calls
    code += [(equal, 0, 1, _CLONE3), (give, 0, 0, absent)]  # its flags are out of a filter's sight; without it libc uses clone
    for numbers in _DENIED.values():
        if (number := numbers[column]) is not None:
            code += [(equal, 0, 1, number), (give, 0, 0, deny)]
    for pair, argument, mask, value in _DENIED_ARGUMENTS.values():
        code += [(equal, 0, 5, pair[column]), (load, 0, 0, 16 + 8 * argument), (mask_with, 0, 0, mask)]
        code += [(equal, 0, 1, value), (give, 0, 0, deny), (give, 0, 0, allow)]
    code.append((give, 0, 0, allow))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
