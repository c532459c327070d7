"""Grading in processes that can be killed: every core busy, a wall-clock and a memory limit for each job.

A job past its limit, or one whose process ends, is not graded, with the reason; its process is killed
(SIGKILL, with its group) and replaced, and the jobs queued behind it go to others. No input can hang the caller.

How: one process, the nursery, is started as a fresh interpreter, so it holds neither the caller's memory, threads
nor CUDA. It runs the warm-up once (imports, caches) and from then on only forks workers and kills them, in
milliseconds. Jobs and grades travel over one socket for each worker, so a worker that is killed in the
middle of a message damages nobody else's. A worker has one job in hand and one in its socket, so it never waits.
When the caller ends, however it ends, the nursery follows, and the kernel kills the workers with the nursery.

Why not pebble, which does most of this: its time-out sends SIGTERM and waits 3 s before it kills; all workers share
one pipe under a lock, so one that is killed while it holds the lock breaks the pool; it knows no memory limit; and
its workers come from the caller's own multiprocessing context, in a stage a fork server with torch loaded that
outlives the stage.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import re
import resource
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, NoReturn

from stages.errors import RewardError
from stages.rewards.grading import Grade, Verdict

MAX_JOB_BYTES = 16 << 20
_AHEAD, _AHEAD_BYTES = 2, 32 << 10
"""Jobs at a worker, and the size up to which one may wait in its socket: two fit, so sending never blocks."""
_CONTROL = struct.Struct("=cq")
_LENGTH = struct.Struct("=I")
_START_S, _ANSWER_S = 120.0, 30.0
_MAX_RESTARTS, _MAX_IDLE_ENDS = 3, 50
_PR_SET_PDEATHSIG = 1
_REASON_CHARACTERS = 300
_MAX_MESSAGE_BYTES = 4 * _REASON_CHARACTERS + 32
_MESSAGE = re.compile(rb"([+-])(%s)\n(.*)" % b"|".join(verdict.encode() for verdict in Verdict), re.DOTALL)
"""Whether its process retires, the verdict, the reason."""
_REMEDY = "free memory, processes or open files (ulimit -n), or give the pool fewer workers"


class Job(NamedTuple):
    """A grader and what it is called with. The grader is a function of a module; its arguments can be pickled."""

    grader: Callable[..., Grade]
    arguments: tuple[Any, ...]


class Pool:
    """Worker processes that grade. Use it as a context manager, or `close` it."""

    def __init__(self, workers: int | None = None, *, seconds: float = 5.0, memory_mib: int = 1024, warm_up: Sequence[Job] = ()) -> None:
        """Start `workers` processes (default: one for each core that this process may use); returns at once.

        A job may take `seconds` of wall clock, and `memory_mib` of address space past what its worker has at the start; a
        worker that keeps more than a quarter of it for its caches is replaced. The `warm_up` jobs run once,
        unlimited and before any other, where all workers are forked from: give jobs that import and fill
        caches, of inputs that can be trusted.
        """
        self.workers = workers or usable_cores()
        self.seconds = seconds
        self.memory_mib = memory_mib
        self._warm_up = tuple(warm_up)
        self._lock = threading.Lock()
        self._hands: list[_Hand] = []
        self._idle_ends = 0
        with _starting():
            self._selector = selectors.DefaultSelector()
            self._nursery, self._control = self._start()
        self._ready = False
        self._closed = False

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes. Calling it twice does no harm; a closed pool grades nothing."""
        self._closed = True
        self._end()
        self._selector.close()

    def _end(self) -> None:
        self._leave()
        self._control.close()
        try:
            self._nursery.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._nursery.kill()
            self._nursery.wait()

    def grade(self, jobs: Sequence[Job]) -> list[Grade]:
        """The grades, in the order of the jobs.

        Raises RewardError when no process can be started, for a job that cannot be pickled, and when the pool is closed.
        """
        if self._closed:
            raise RewardError("the pool is closed, so it has no processes left to grade with; make another")
        grades: list[Grade | None] = [None] * len(jobs)
        waiting: deque[_Task] = deque()
        for index, job in enumerate(jobs):
            payload = _pickled(job)
            if len(payload) > MAX_JOB_BYTES:
                grades[index] = Grade(Verdict.NOT_GRADED, f"a job of {len(payload):,} bytes; at most {MAX_JOB_BYTES:,} are sent")
            else:
                waiting.append(_Task(index, payload))
        with self._lock:
            try:
                self._work_off(waiting, grades)
            except BaseException:
                self._leave()  # what is under way belongs to nobody any more
                raise
        assert None not in grades
        return [grade for grade in grades if grade is not None]

    def _work_off(self, waiting: deque[_Task], grades: list[Grade | None]) -> None:
        restarts = 0
        self._bury(waiting, grades)
        while waiting or any(hand.tasks for hand in self._hands):
            try:
                self._turn(waiting, grades)
            except _NurseryGoneError as error:
                restarts += 1
                if restarts > _MAX_RESTARTS:
                    raise RewardError(f"grading processes cannot be kept running: {error}; see what they printed") from error
                self._restart(waiting)

    def _bury(self, waiting: deque[_Task], grades: list[Grade | None]) -> None:
        """Replace the workers that ended while they had nothing to do."""
        for key, _ in self._selector.select(0):
            with suppress(_NurseryGoneError):  # met again, and mended, by the first turn
                self._lose(key.data, waiting, grades, None)

    def _turn(self, waiting: deque[_Task], grades: list[Grade | None]) -> None:
        """Hand out, wait for what comes first, take it in, end what is late."""
        while len(self._hands) < self.workers:
            self._fork()
        self._hand_out(waiting, grades)
        now = time.monotonic()
        deadlines = [hand.deadline for hand in self._hands if hand.tasks]
        wait = max(0.0, min(deadlines) - now) if deadlines else 0.0
        ready: list[_Hand] = [key.data for key, _ in self._selector.select(wait)]
        # late is who was so before we looked and still had nothing to say: our own delays never count
        late = [hand for hand in self._hands if hand.tasks and hand.deadline <= now and hand not in ready]
        for hand in ready:
            self._take_in(hand, waiting, grades)
        for hand in late:
            self._lose(hand, waiting, grades, f"timed out after {self.seconds:g} s")

    def _hand_out(self, waiting: deque[_Task], grades: list[Grade | None]) -> None:
        for ahead in range(_AHEAD):
            for hand in list(self._hands):
                if waiting and len(hand.tasks) == ahead and (ahead == 0 or _small(waiting[0], *hand.tasks)):
                    task = waiting.popleft()
                    hand.tasks.append(task)
                    if len(hand.tasks) == 1:
                        hand.deadline = time.monotonic() + self.seconds
                    try:
                        hand.socket.sendall(_LENGTH.pack(len(task.payload)) + task.payload)
                    except TimeoutError:
                        self._lose(hand, waiting, grades, "the grading process does not take it")
                    except OSError:  # it has ended: what it still said, or that it ended, is read next
                        hand.tasks.pop()
                        waiting.appendleft(task)

    def _take_in(self, hand: _Hand, waiting: deque[_Task], grades: list[Grade | None]) -> None:
        try:
            data = hand.socket.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._lose(hand, waiting, grades, "")
            return
        hand.buffer += data
        while len(hand.buffer) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(hand.buffer)
            if size <= _MAX_MESSAGE_BYTES and len(hand.buffer) < _LENGTH.size + size:
                break
            message = _MESSAGE.fullmatch(hand.buffer[_LENGTH.size : _LENGTH.size + size])
            if message is None or not hand.tasks:
                self._lose(hand, waiting, grades, "the grading process sent what is no grade")
                return
            del hand.buffer[: _LENGTH.size + size]
            retires, verdict, reason = (bytes(group).decode("utf-8", "replace") for group in message.groups())
            grades[hand.tasks.popleft().place] = Grade(Verdict(verdict), reason)
            self._idle_ends = 0
            hand.deadline = time.monotonic() + self.seconds
            if retires == "-":  # it retires: no fault of what it had not begun
                self._lose(hand, waiting, grades, None)
                return

    def _lose(self, hand: _Hand, waiting: deque[_Task], grades: list[Grade | None], reason: str | None) -> None:
        """Kill a worker. Its first job is not graded for `reason` ("": the way it ended; None: no job is to blame)."""
        try:
            status = self._ask(b"K", hand.pid)
        except _NurseryGoneError:
            waiting.extendleft(reversed(hand.tasks))
            hand.tasks.clear()
            raise
        finally:
            self._dismiss(hand)
        if not hand.tasks and reason is not None:
            self._idle_ends += 1
            if self._idle_ends > _MAX_IDLE_ENDS:
                raise RewardError(
                    f"grading processes end before they grade anything, {_ending(status)}; is memory_mib={self.memory_mib} too low?"
                )
        if hand.tasks and reason is not None:
            task = hand.tasks.popleft()
            grades[task.place] = Grade(Verdict.NOT_GRADED, reason or f"the grading process ended, {_ending(status)}")
        waiting.extendleft(reversed(hand.tasks))

    def _dismiss(self, hand: _Hand) -> None:
        with suppress(KeyError, ValueError):  # interrupted half-way before
            self._selector.unregister(hand.socket)
        hand.socket.close()
        self._hands.remove(hand)

    # the nursery

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        warm_up = pickle.dumps(self._warm_up)
        ours, theirs = socket.socketpair()
        command = "import sys; from stages.rewards.pool import _nursery; _nursery(*map(int, sys.argv[1:]))"
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), "PYTHONHASHSEED": "0"}
        with theirs:
            try:
                process = subprocess.Popen(  # noqa: S603 - our own interpreter with our own module
                    [sys.executable, "-c", command, str(theirs.fileno()), str(self.memory_mib), str(os.getpid())],
                    env=environment,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
            except BaseException:
                ours.close()
                raise
        ours.settimeout(_START_S)
        with suppress(ConnectionError):  # it has ended already, which the first request to it will tell
            ours.sendall(_LENGTH.pack(len(warm_up)) + warm_up)
        return process, ours

    def _restart(self, waiting: deque[_Task]) -> None:
        for hand in self._hands:
            waiting.extendleft(reversed(hand.tasks))
            hand.tasks.clear()
        self._nursery.kill()
        self._end()
        with _starting():
            self._nursery, self._control = self._start()
        self._ready = False

    def _leave(self) -> None:
        for hand in list(self._hands):
            with suppress(_NurseryGoneError):
                self._ask(b"K", hand.pid)
            self._dismiss(hand)

    def _fork(self) -> None:
        with _starting():
            ours, theirs = socket.socketpair()
        with theirs:
            try:
                pid = self._ask(b"F", 0, theirs.fileno())
            except BaseException:
                ours.close()
                raise
        ours.settimeout(self.seconds)
        hand = _Hand(ours, pid)
        self._hands.append(hand)
        self._selector.register(ours, selectors.EVENT_READ, hand)

    def _ask(self, what: bytes, number: int, *descriptors: int) -> int:
        """Have a worker forked or killed. Interrupted, it ends the nursery: the next request must not get this one's answer."""
        try:
            if not self._ready:
                self._answer()
                self._control.settimeout(_ANSWER_S)
                self._ready = True
            socket.send_fds(self._control, [_CONTROL.pack(what, number)], descriptors)
            return self._answer()
        except BaseException as error:
            self._control.close()
            if isinstance(error, OSError):
                raise _NurseryGoneError(f"the process they come from is gone, or does not answer: {error}") from error
            raise

    def _answer(self) -> int:
        data = _received(self._control, _CONTROL.size)
        if len(data) < _CONTROL.size:
            raise _NurseryGoneError(f"the process they come from ended, status {self._nursery.poll()}")
        what, number = _CONTROL.unpack(data)
        if what == b"X":
            raise _NurseryGoneError(f"no process could be forked: {os.strerror(number)}")
        return int(number)


class _NurseryGoneError(RewardError):
    """The nursery ended or does not answer."""


class _Task(NamedTuple):
    place: int
    payload: bytes


class _Hand:
    """A worker as the caller sees it."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.socket = connection
        self.pid = pid
        self.tasks: deque[_Task] = deque()
        self.deadline = 0.0
        """Of the first task."""
        self.buffer = bytearray()


@contextmanager
def _starting() -> Iterator[None]:
    """What the system refuses is an error of rewards, with the remedy."""
    try:
        yield
    except OSError as error:
        raise RewardError(f"no process for grading could be started: {error.strerror or error}; {_REMEDY}") from error


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _small(*tasks: _Task) -> bool:
    return all(len(task.payload) <= _AHEAD_BYTES for task in tasks)


def _pickled(job: Job) -> bytes:
    try:
        return pickle.dumps(tuple(job), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # what cannot be pickled says so in many ways
        raise RewardError(
            f"a grading job cannot be sent to its process: {error}; a grader is a function of a module, its arguments are plain values"
        ) from error


def _ending(status: int) -> str:
    return f"killed by signal {-status}" if status < 0 else f"status {status}"


def _received(connection: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes, or fewer when the other end is closed."""
    data = bytearray()
    with suppress(ConnectionError):  # closed before it has read what we sent
        while len(data) < size and (part := connection.recv(size - len(data))):
            data += part
    return bytes(data)


# --- in the nursery and in the workers ---


def _nursery(descriptor: int, memory_mib: int, caller: int) -> NoReturn:
    """Warm up, then fork and kill on request until the caller is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=descriptor)
    head = _received(control, _LENGTH.size)
    warm_up = _received(control, _LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else b""
    if not warm_up:
        os._exit(0)
    for grader, arguments in pickle.loads(warm_up):  # noqa: S301 - from the process that started us
        grader(*arguments)
    gc.collect()
    gc.freeze()  # pages that hold what was imported stay shared
    with suppress(ConnectionError):  # closed meanwhile: met at once below
        control.sendall(_CONTROL.pack(b"R", 0))
    control.settimeout(2.0)
    children: set[int] = set()
    nursery = os.getpid()
    while os.getppid() == caller:
        try:
            data, descriptors, _, _ = socket.recv_fds(control, _CONTROL.size, 1)
        except TimeoutError:
            continue
        except OSError:
            break
        if not data:
            break
        what, number = _CONTROL.unpack(data)
        if what == b"F":
            try:
                number = os.fork()
            except OSError as error:
                what, number = b"X", error.errno or 0
            else:
                if number == 0:
                    control.close()
                    _work(socket.socket(fileno=descriptors[0]), nursery, memory_mib << 20)
                children.add(number)
            os.close(descriptors[0])
        else:
            status = _killed(number) if number in children else 0
            children.discard(number)
            number = status
        try:
            control.sendall(_CONTROL.pack(what, number))
        except ConnectionError:
            break
    for child in children:
        _killed(child)
    os._exit(0)


def _killed(pid: int) -> int:
    """Kill a worker and what it started; how it ended: minus the signal, or its status."""
    for kill in (os.killpg, os.kill):  # it may not lead its group yet
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _work(connection: socket.socket, nursery: int, memory: int) -> NoReturn:
    """Grade what comes, until the other end is closed or too much memory has stayed in use."""
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != nursery:
            os._exit(1)  # it died in between
        size = _address_space() + memory
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    start, own = _resident(), os.getpid()
    while len(head := _received(connection, _LENGTH.size)) == _LENGTH.size:
        (size,) = _LENGTH.unpack(head)
        payload = _received(connection, size)
        if len(payload) < size:
            break
        verdict, reason, retires = _graded(payload, memory)
        if os.getpid() != own:
            os._exit(0)  # a copy that the grader has made
        retires = retires or _resident() - start > memory // 4
        text = f"{'-' if retires else '+'}{verdict}\n{reason[:_REASON_CHARACTERS]}".encode("utf-8", "replace")
        try:
            connection.sendall(_LENGTH.pack(len(text)) + text)
        except ConnectionError:  # nobody waits for it any more
            break
        if retires:
            break
    os._exit(0)


def _graded(payload: bytes, memory: int) -> tuple[Verdict, str, bool]:
    """The grade of a job, and whether its process should end. What a grader raises is not graded, never wrong."""
    try:
        grader, arguments = pickle.loads(payload)  # noqa: S301 - from the process that started us
        verdict, reason = grader(*arguments)
        return Verdict(verdict), str(reason), False
    except MemoryError:
        return Verdict.NOT_GRADED, f"out of memory: more than {memory >> 20} MiB", True
    except RecursionError:
        return Verdict.NOT_GRADED, "nested too deeply", False
    except BaseException as error:  # noqa: BLE001 - whatever a library does, the job is not graded and says why
        return Verdict.NOT_GRADED, f"the grader failed with {traceback.format_exception_only(error)[-1].strip()}", True


def _address_space() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


def _resident() -> int:
    """Peak resident bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if sys.platform == "linux" else 1)
