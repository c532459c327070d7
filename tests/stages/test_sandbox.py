"""The sandbox: real programs that try to get out, to look around, or never to end."""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from stages.rewards.sandbox import Limits, Outcome, SandboxError, require_sandbox, run_program

SMALL = Limits(cpu_s=1, wall_s=3, memory_mib=256, tmp_mib=8, file_mib=4, output_kib=64, open_files=32)
ROOT = Path(__file__).parents[2]
_SUBREAPER = 36

needs_bwrap = pytest.mark.usefixtures("bubblewrap")


def children() -> set[int]:
    return {int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


def ends(pid: int, timeout_s: float = 5) -> bool:
    """Whether a process is dead within the time; a process that is gone already is."""
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([watch], [], [], timeout_s)[0])
    finally:
        os.close(watch)


@pytest.fixture
def orphans_come_here() -> Iterator[None]:
    """What a sandbox leaves behind becomes a child of this process."""
    libc = ctypes.CDLL(None)
    libc.prctl(_SUBREAPER, 1)
    yield
    libc.prctl(_SUBREAPER, 0)


@pytest.fixture
def attack(orphans_come_here: None) -> Callable[..., Outcome]:
    """Run a program; nothing of it is alive afterwards, and it kept to the wall clock."""

    def run(program: str, limits: Limits = SMALL) -> Outcome:
        before = children()
        outcome = run_program(program, "an input\n", limits)
        for pid in children() - before:
            assert ends(pid, 1), f"process {pid} of the sandbox lives"
            os.waitpid(pid, 0)
        assert outcome.seconds < limits.wall_s + 2
        assert len(outcome.output) <= limits.output_kib * 1024
        return outcome

    return run


@needs_bwrap
def test_sandbox_of_this_host_passes_its_own_check() -> None:
    assert require_sandbox() is None


@needs_bwrap
def test_sandbox_program_gets_its_input_and_gives_its_output() -> None:
    outcome = run_program("import sys\nprint(sys.stdin.read().upper())\nprint('to err', file=sys.stderr)", "grüße ½\n")
    assert outcome[:3] == ("", "GRÜSSE ½\n\n", "to err")


@needs_bwrap
@pytest.mark.parametrize(
    "program",
    [
        "print(open('/dev/stdin').read())",
        "print(open(0).read())",
        "import os\nprint(os.read(0, 100).decode())",
        "print(input())\nquit()\nprint('more')",
        "print(input())\nexit()",
        "import os, sys\nsys.stderr = open(os.devnull, 'w')\nprint(1, file=sys.stderr)\nprint(input())",
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int'\nprint(A(1).x and input())",
        "import pickle\nclass A: pass\npickle.loads(pickle.dumps(A()))\nprint(input())",
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(64 << 20)\n"
        "t = threading.Thread(target=lambda: print(input()))\nt.start()\nt.join()",
        "import asyncio\nasync def main():\n    print(input())\nasyncio.run(main())",
        "if __name__ == '__main__':\n    print(input())",
        "import decimal, fractions, heapq, itertools, math, re, sqlite3, statistics\nprint(input())",
        "open('/tmp/notes', 'w').write('x')\nprint(input() if open('notes').read() == 'x' else 0)",
    ],
)
def test_sandbox_what_honest_programs_do_works(program: str) -> None:
    outcome = run_program(program, "an input\n")
    assert outcome.fault == "", outcome.errors
    assert outcome.output.strip() == "an input"


@needs_bwrap
def test_sandbox_hash_order_is_the_same_in_every_run() -> None:
    program = "print(list({'one', 'two', 'three', 'four', 'five', 'six', 'seven'}))"
    assert len({run_program(program).output for _ in range(4)}) == 1


@needs_bwrap
@pytest.mark.parametrize(
    ("program", "fault"),
    [
        ("import sys; sys.exit(3)", "status 3"),
        ("raise SystemExit('no')", "status 1: no"),
        ("1/0", "ZeroDivisionError"),
        ("def f(:", "SyntaxError"),
        ("print(os)", "NameError"),  # nothing of ours stands in the program's names
        ("x = '\0'", "null bytes"),
        ("import numpy", "ModuleNotFoundError"),
        ("input()\ninput()", "EOFError"),
        ("import ctypes; ctypes.string_at(0)", "status 139"),
        ("import os; os.abort()", "status 139"),
        ("def f(): f()\nf()", "RecursionError"),
        ("(" * 100_000, "status 1"),
        ("print('\\ud800')", "UnicodeEncodeError"),
    ],
)
def test_sandbox_program_that_fails_is_told_from_a_sandbox_that_fails(program: str, fault: str, attack: Callable[..., Outcome]) -> None:
    assert fault in attack(program).fault


@needs_bwrap
@pytest.mark.parametrize(
    "program",
    [
        "import os; os._exit(137)",
        "import sys; sys.exit(137)",
        "import os; os._exit(0x389)",
        "import os; os.kill(os.getpid(), 9)",
        "import signal; signal.raise_signal(9)",
        "import signal, threading; signal.pthread_kill(threading.get_ident(), 9)",
        "import resource; resource.prlimit(1, resource.RLIMIT_CPU, (0, 0))\nwhile True: pass",
        "import os; os.kill(1, 9); os.kill(os.getppid(), 9)",
        "import os; os.kill(-1, 9)",
        "import sys; print('bwrap: setting up failed', file=sys.stderr); sys.exit(1)",
        "import os\nfor fd in range(3, 64):\n    try:\n        os.ftruncate(fd, 0)\n    except OSError:\n        pass\nos._exit(1)",
    ],
)
def test_sandbox_program_cannot_pretend_that_the_sandbox_failed(program: str, attack: Callable[..., Outcome]) -> None:
    assert attack(program + "\nraise SystemExit(5)").fault.startswith(("status", "more than"))


@needs_bwrap
@pytest.mark.parametrize(
    ("program", "fault"),
    [
        ("while True: pass", "more than 1 s of processor time"),
        ("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", "more than 1 s of processor time"),
        ("import time\ntime.sleep(60)", "not finished after 1.5 s"),
        ("import threading\nthreading.Lock().acquire()\nthreading.Event().wait()", "not finished after 1.5 s"),
        (
            "import signal\nfor s in set(signal.Signals) - {9, 19}: signal.signal(s, signal.SIG_IGN)\nsignal.pause()",
            "not finished after 1.5 s",
        ),
        ("import time, atexit\natexit.register(time.sleep, 60)", "not finished after 1.5 s"),
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()", "not finished after 1.5 s"),
        ("class A:\n    def __del__(self):\n        while True: pass\na = A()", "more than 1 s of processor time"),
        ("print(9 ** 9 ** 9)", "more than 1 s of processor time"),
    ],
)
def test_sandbox_program_that_never_ends_is_ended_at_its_limit(program: str, fault: str, attack: Callable[..., Outcome]) -> None:
    wall_s = 1.5 if "1.5" in fault else 10.0
    assert attack(program, SMALL._replace(wall_s=wall_s)).fault == fault


@needs_bwrap
@pytest.mark.parametrize(
    "start",
    [
        "while True: os.fork()",
        "while True: os.forkpty()",
        "while True: subprocess.Popen([sys.executable])",
        "os.system('true') and exit(9)",
        "os.posix_spawn(sys.executable, [sys.executable], {})",
        "multiprocessing.Process(target=int).start()",
        "ctypes.CDLL(None).syscall(57) < 0 and exit(9)",  # fork
        "ctypes.CDLL(None).syscall(56, 17, 0, 0, 0, 0) < 0 and exit(9)",  # clone
        "ctypes.CDLL(None).syscall(435, 0, 0) < 0 and exit(9)",  # clone3
        "ctypes.CDLL(None).syscall(0x40000000 + 57) < 0 and exit(9)",  # fork by its x32 number
    ],
)
def test_sandbox_fork_bomb_starts_no_process(start: str, attack: Callable[..., Outcome]) -> None:
    outcome = attack(f"import ctypes, multiprocessing, os, subprocess, sys\n{start}")
    assert any(word in outcome.fault for word in ("not permitted", "No such file", "status 9")), outcome


@needs_bwrap
def test_sandbox_thread_bomb_ends_within_its_limits(attack: Callable[..., Outcome]) -> None:
    outcome = attack(
        "import threading\nthreading.stack_size(32768)\nwhile True: threading.Thread(target=threading.Event().wait).start()",
        SMALL._replace(wall_s=1.5),
    )
    assert outcome.fault


THREADS_WITHOUT_STACKS = """
import ctypes
libc = ctypes.CDLL(None)
memory = ctypes.create_string_buffer(20_000 * 1024)
top = ctypes.addressof(memory) & ~63
for number in range(1, 20_000):
    libc.clone(libc.pause, ctypes.c_void_p(top + 1024 * number), 0x50F00, None)
libc.pause()
"""


@needs_bwrap
def test_sandbox_threads_that_need_no_memory_are_stopped_long_before_the_host_has_no_more(attack: Callable[..., Outcome]) -> None:
    assert attack(THREADS_WITHOUT_STACKS, SMALL._replace(cpu_s=10, wall_s=20)).fault == "more than 256 threads"


@needs_bwrap
@pytest.mark.parametrize(
    "make",
    ["os.close(os.open(f'/tmp/{number}', os.O_CREAT))", "os.mkdir(f'/tmp/{number}')", "os.symlink('x', f'/tmp/{number}')"],
)
def test_sandbox_files_that_need_no_room_are_stopped_long_before_the_host_has_no_memory(make: str, attack: Callable[..., Outcome]) -> None:
    program = f"import os, time\nfor number in range(30_000): {make}\ntime.sleep(60)"
    assert attack(program, SMALL._replace(cpu_s=10, wall_s=20)).fault == "more than 10000 files"


@needs_bwrap
def test_sandbox_that_is_slow_to_start_is_not_held_to_account_for_the_files_of_the_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow = tmp_path / "bwrap"
    slow.write_text(f'#!/bin/sh\n/bin/sleep 0.5\nexec {shutil.which("bwrap")} "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert run_program("print(1)", limits=SMALL._replace(files=1))[:2] == ("", "1\n")


@needs_bwrap
def test_sandbox_threads_and_files_within_their_limits_are_no_fault(attack: Callable[..., Outcome]) -> None:
    program = """
import threading, time
threads = [threading.Thread(target=time.sleep, args=(0.3,)) for _ in range(100)]
for thread in threads: thread.start()
for number in range(2000): open(f"/tmp/{number}", "w").close()
for thread in threads: thread.join()
"""
    assert attack(program, SMALL._replace(cpu_s=4, wall_s=8, memory_mib=4096)).fault == ""


@needs_bwrap
@pytest.mark.parametrize(
    "bomb",
    [
        "x = bytearray(1 << 40)",
        "x = []\nwhile True: x.append(bytearray(1 << 20))",
        "import mmap\nx = [mmap.mmap(-1, 1 << 20) for _ in range(10**6)]",
        "x = 'a' * 10\nwhile True: x += x",
        "import os\nos.memfd_create('x')",
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))",
    ],
)
def test_sandbox_memory_bomb_gets_no_more_than_its_limit(bomb: str, attack: Callable[..., Outcome]) -> None:
    outcome = attack(bomb)
    assert any(word in outcome.fault for word in ("MemoryError", "Cannot allocate", "not permitted", "not allowed", "exceeds")), outcome


@needs_bwrap
@pytest.mark.parametrize(
    "bomb",
    [
        "open('/tmp/x', 'wb').write(bytes(5 << 20))",
        "open('/tmp/x', 'wb').truncate(1 << 40)",
        "for i in range(10): open(f'/tmp/{i}', 'wb').write(bytes(1 << 20))",
        "open('/dev/null', 'wb').write(bytes(5 << 20))",
        "files = [open('/tmp/x', 'w') for _ in range(100)]",
    ],
)
def test_sandbox_huge_or_many_files_are_cut_off(bomb: str, attack: Callable[..., Outcome]) -> None:
    outcome = attack(bomb)
    assert any(word in outcome.fault for word in ("File too large", "No space left", "Too many open files")), outcome


@needs_bwrap
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_sandbox_output_without_end_is_cut_off(stream: str, attack: Callable[..., Outcome]) -> None:
    outcome = attack(f"import sys\nwhile True: sys.{stream}.write('x' * 5000)")
    assert outcome.fault.startswith("status ")
    assert len(outcome.errors) <= 2000


@needs_bwrap
def test_sandbox_output_past_its_limit_is_a_fault(attack: Callable[..., Outcome]) -> None:
    assert attack("print('x' * 65535)").fault == ""
    assert attack("print('x' * 65536)").fault == "more than 64 KiB of output"


@needs_bwrap
def test_sandbox_writes_outside_touch_nothing_of_the_host(attack: Callable[..., Outcome], tmp_path: Path) -> None:
    places = [
        "/x",
        "/etc/x",
        "/usr/lib/x",
        f"{sys.base_prefix}/lib/x",
        f"{os.path.dirname(os.__file__)}/json/x.py",
        "/dev/x",
        str(tmp_path / "x"),
    ]
    program = f"""
import os
for path in {places}:
    for attempt in (lambda: open(path, "w"), lambda: os.makedirs(path), lambda: os.symlink("/tmp", path), lambda: os.mkfifo(path)):
        try:
            attempt()
            path.startswith("/tmp/") or print("made", path)
        except OSError:
            pass
for path in ("/program.py", "/usr/lib", os.__file__, "/dev/null"):
    for attempt in (lambda: os.chmod(path, 0), lambda: os.rename(path, "/tmp/y"), lambda: os.utime(path, (0, 0)), lambda: os.unlink(path)):
        try:
            attempt()
            path == "/dev/null" or print("changed", path)
        except OSError:
            pass
open("/tmp/left", "w").write("here")
"""
    null = os.stat("/dev/null")
    assert attack(program)[:2] == ("", "")
    assert not any(Path(path).exists() for path in [*places, "/tmp/left", "/program.py"])
    assert os.stat("/dev/null").st_mode == null.st_mode
    assert os.stat("/dev/null").st_size == 0


@needs_bwrap
def test_sandbox_symlinks_lead_to_nothing_of_the_host(attack: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("the-secret")
    targets = [str(tmp_path / "secret"), str(ROOT / "README.md"), "/etc/passwd", "/proc/1/root/etc/passwd", "../../../../etc/passwd"]
    outcome = attack(f"""
import os
for number, target in enumerate({targets}):
    os.symlink(target, f"/tmp/{{number}}")
    print(os.path.exists(f"/tmp/{{number}}"))
""")
    assert outcome[:2] == ("", "False\n" * 5)


@needs_bwrap
def test_sandbox_runs_share_nothing(attack: Callable[..., Outcome]) -> None:
    program = """
import os
print(os.listdir("/tmp"), open("/dev/null").read())
for path in ("/tmp/x", "/dev/null"):
    open(path, "w").write("1")
"""
    assert [attack(program).output for _ in range(2)] == ["[] \n"] * 2


@needs_bwrap
def test_sandbox_environment_and_open_files_hold_no_secret(attack: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_TOKEN", "the-secret")
    monkeypatch.setenv("PYTHONSTARTUP", "/the-secret")
    inherited = os.open(__file__, os.O_RDONLY)
    os.set_inheritable(inherited, True)
    outcome = attack("""
import ctypes, os
print({name: value for name, value in os.environ.items() if name not in ("PYTHONHASHSEED", "PWD", "LC_CTYPE")})
def is_open(fd):
    try:
        return bool(os.fstat(fd))
    except OSError:
        return False
print([fd for fd in range(3, 1024) if is_open(fd)])
print(os.getcwd(), os.getuid(), os.uname().nodename, os.getpid())
""")
    os.close(inherited)
    assert outcome.output == "{}\n[]\n/tmp 65534 sandbox 1\n"


@needs_bwrap
def test_sandbox_host_is_out_of_sight(attack: Callable[..., Outcome]) -> None:
    outcome = attack("""
import os
print(sorted(os.listdir("/")), os.path.exists("/proc/self"), os.path.exists("/sys"), os.listdir("/dev"))
for path in ("/proc/1/environ", "/proc/self/environ", "/etc/passwd", "/etc/hostname", "/root/.bashrc", "/home"):
    if os.path.exists(path):
        print("sees", path)
""")
    seen, rest = outcome.output.split("]", 1)
    assert not {"'proc'", "'sys'", "'home'", "'work'", "'run'", "'var'", "'mnt'"} & set(seen.strip("[").split(", "))
    assert "sees" not in rest
    assert rest.startswith(" False False")


@needs_bwrap
def test_sandbox_installed_packages_are_not_there(attack: Callable[..., Outcome]) -> None:
    outcome = attack("""
import os, sys
for root in (os.path.dirname(os.__file__), "/usr/lib/python3", "/usr/local/lib"):
    for folder, names, files in os.walk(root):
        if folder.endswith(("site-packages", "dist-packages")) and (names or files):
            print(folder, names, files)
""")
    assert outcome[:2] == ("", "")


@needs_bwrap
@pytest.mark.slow
def test_sandbox_program_starved_by_the_host_is_no_fault_of_its_own() -> None:
    """Six busy processes of higher priority on the one core that the program may use; in sessions of their own, since the kernel may
    share a core out by session first."""
    code = """
import os, subprocess, sys
from stages.rewards.sandbox import Limits, SandboxError, run_program
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True) for _ in range(6)]
os.nice(5)
try:
    print(run_program("while True: pass", limits=Limits(cpu_s=2, wall_s=4.0)))
except SandboxError as error:
    print("SandboxError", error)
finally:
    for process in busy:
        process.kill()
        process.wait()
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    assert ran.stdout.startswith("SandboxError a program waited"), ran.stdout
    assert "for a free core" in ran.stdout


@needs_bwrap
def test_sandbox_network_is_shut(attack: Callable[..., Outcome]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        outcome = attack(f"""
import socket, urllib.request
attempts = {{
    "tcp": lambda: socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), 1),
    "udp": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 53)),
    "raw": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW),
    "unix": lambda: socket.socket(socket.AF_UNIX).connect("\\0abstract"),
    "vsock": lambda: socket.socket(40, socket.SOCK_STREAM).connect((2, 1)),
    "netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
    "names": lambda: socket.getaddrinfo("example.org", 80),
    "http": lambda: urllib.request.urlopen("http://127.0.0.1:{server.getsockname()[1]}", timeout=1),
}}
for name, attempt in attempts.items():
    try:
        attempt()
        print("open", name)
    except OSError:
        print("shut", name)
""")
        assert select.select([server], [], [], 0)[0] == []
    assert [line.split()[0] for line in outcome.output.splitlines()] == ["shut"] * 8, outcome


@needs_bwrap
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers below are those of x86-64")
def test_sandbox_dangerous_system_calls_are_refused(attack: Callable[..., Outcome]) -> None:
    numbers = {
        "ptrace": 101, "process_vm_readv": 310, "unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "pivot_root": 155,
        "chroot": 161, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "io_uring_setup": 425, "keyctl": 250, "shmget": 29,
        "open_by_handle_at": 304, "setpriority": 141, "sched_setscheduler": 144, "memfd_secret": 447, "fsopen": 430,
        "personality": 135,
    }  # fmt: skip
    outcome = attack(f"""
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
for name, number in {numbers}.items():
    ctypes.set_errno(0)
    if libc.syscall(number, 0, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() != errno.EPERM:
        print(name, ctypes.get_errno())
""")
    assert outcome[:2] == ("", "")


@needs_bwrap
def test_sandbox_no_way_to_more_rights(attack: Callable[..., Outcome]) -> None:
    outcome = attack("""
import os, resource
attempts = (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setgroups([0]), lambda: os.nice(5), lambda: os.chroot("/tmp"),
            lambda: os.mknod("/tmp/d", 0o60600, 259), lambda: os.sched_setaffinity(0, {0}),
            lambda: resource.setrlimit(resource.RLIMIT_CPU, (900, 900)), lambda: os.execv("/bin/sh", ["sh"]))
for number, attempt in enumerate(attempts):
    try:
        attempt()
        print("done", number)
    except (OSError, ValueError):
        pass
""")
    assert outcome[:2] == ("", "")


@needs_bwrap
def test_sandbox_dies_with_the_process_that_started_it(orphans_come_here: None) -> None:
    program = "import threading, time\nfor _ in range(7): threading.Thread(target=time.sleep, args=(60,)).start()\n"
    started = subprocess.Popen(
        [sys.executable, "-c", f"from stages.rewards.sandbox import run_program; run_program({program!r})"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    watch = os.pidfd_open(started.pid)
    inside: list[int] = []
    while not any(threads(pid) == 8 for pid in inside) and not select.select([watch], [], [], 0.01)[0]:
        inside = descendants(started.pid)
    started.kill()
    started.wait()
    os.close(watch)
    assert len(inside) == 2  # bwrap and the program
    for pid in inside:
        assert ends(pid), f"process {pid} of the sandbox outlived its parent"
    for pid in children() & set(inside):
        os.waitpid(pid, 0)


@needs_bwrap
def test_sandbox_whose_parent_dies_before_it_is_up_runs_nothing(orphans_come_here: None, tmp_path: Path) -> None:
    """A bwrap that is held back until its parent is dead: nobody would end the program."""
    os.mkfifo(tmp_path / "go")
    late = tmp_path / "bwrap"
    late.write_text(f'#!/bin/sh\nread _ < {tmp_path}/go\nexec {shutil.which("bwrap")} "$@"\n')
    late.chmod(0o755)
    started = subprocess.Popen(
        [sys.executable, "-c", "from stages.rewards.sandbox import run_program; run_program('import time; time.sleep(60)')"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    with (tmp_path / "go").open("w") as go:  # opens when the other side reads
        (pid,) = descendants(started.pid)
        started.kill()
        started.wait()
        go.write("\n")
    assert ends(pid, 10)
    os.waitpid(pid, 0)


def threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def descendants(pid: int) -> list[int]:
    try:
        own = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [*own, *(grandchild for child in own for grandchild in descendants(child))]


@needs_bwrap
def test_sandbox_interrupted_wait_leaves_nothing(orphans_come_here: None) -> None:
    before = children()

    def interrupt(*_: object) -> None:
        raise InterruptedError("stop")

    earlier = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(InterruptedError):
            run_program("import time\ntime.sleep(60)")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)
    for pid in children() - before:
        assert ends(pid)
        os.waitpid(pid, 0)


def test_sandbox_without_bubblewrap_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match=r"`bwrap` .* is not there.*apt-get install bubblewrap"):
        run_program("open('ran', 'w')")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'bwrap: No permissions to create new namespace' >&2; exit 1", "No permissions to create new namespace"),
        ("exit 0", "bwrap ended with status 0"),
        ("kill -9 $$", "bwrap ended with status -9"),
    ],
)
def test_sandbox_host_that_forbids_it_is_refused_with_its_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, reason: str
) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SandboxError, match=reason):
        run_program("print(1)")


@pytest.mark.parametrize("missing", ["sys.platform = 'darwin'", "del os.memfd_create", "del os.pidfd_open"])
def test_sandbox_on_another_system_is_refused_and_no_other_error(missing: str) -> None:
    code = (
        f"import os, sys\nfrom stages.rewards.sandbox import *\n{missing}\n"
        "for attempt in (require_sandbox, lambda: run_program('print(1)')):\n"
        "    try:\n        attempt()\n    except SandboxError as error:\n        print(error)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    assert ran.stdout.count("no sandbox on this host: this system is not Linux") == 2


@needs_bwrap
def test_sandbox_words_of_a_program_reach_no_terminal_or_table_as_commands(attack: Callable[..., Outcome]) -> None:
    outcome = attack("import sys\nsys.exit('\\x1b]0;owned\\x07\\x1b[2Jgone\\x00\\u202e\\x9b')")
    assert outcome.fault == r"status 1: \x1b]0;owned\x07\x1b[2Jgone\x00\u202e\x9b"
    assert all(line.isprintable() for line in outcome.errors.splitlines())


@needs_bwrap
@pytest.mark.parametrize("program", ["print(1)", "import time\ntime.sleep(60)"], ids=["ends", "hangs"])
@pytest.mark.parametrize("files", [0, 3, 5, 8, 10, 11, 12, 13, 14, 16, 24])
def test_sandbox_with_room_for_few_more_open_files_runs_the_program_or_says_what_is_short(
    files: int, program: str, attack: Callable[..., Outcome], room_for: Callable[[int], AbstractContextManager[None]]
) -> None:
    attack("print(1)")  # what is read once is read
    refused, before = "", children()
    with room_for(files):
        try:
            outcome = run_program(program, limits=SMALL._replace(wall_s=2.0))
        except SandboxError as error:
            refused = str(error)
    if refused:
        assert refused.startswith("a program could not be started in its sandbox: Too many open files; free memory")
        assert files < 16
    else:
        assert (outcome.output, outcome.fault) in (("1\n", ""), ("", "not finished after 2 s"))
        assert files > 5
    for pid in children() - before:
        assert ends(pid, 1), f"process {pid} of the sandbox lives"
        os.waitpid(pid, 0)


def test_sandbox_that_gives_another_limit_than_asked_is_refused() -> None:
    """A limit that the host caps lower cannot be set, and the program is not run with less."""
    code = (
        "import resource\nfrom stages.rewards.sandbox import *\nresource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n"
        "try:\n    run_program('print(1)')\nexcept SandboxError as error:\n    print(type(error).__name__, error)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    assert ran.stdout.startswith("SandboxError")
