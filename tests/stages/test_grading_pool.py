"""The pool of graders: limits for each job, replacement of what was killed, no process left behind, 10,000 hostile inputs."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stages.errors import RewardError
from stages.rewards.equivalence import equivalent, math_pool
from stages.rewards.grading import Grade, Verdict
from stages.rewards.pool import MAX_JOB_BYTES, Job, Pool

ROOT = Path(__file__).parents[2]
HOSTILE = [json.loads(line) for line in (ROOT / "datasets" / "hostile.jsonl").read_text(encoding="utf-8").splitlines()]
INPUTS = 10_000
RoomFor = Callable[[int], contextlib.AbstractContextManager[None]]

HANG = Job(signal.pause, ())
HOG = Job(pow, (3, 10**9))  # holds the interpreter's lock: no thread and no handler of its own could end it
CRASH = Job(signal.raise_signal, (signal.SIGSEGV,))
LEAVE = Job(os._exit, (3,))
EAT = Job(bytearray, (700 << 20,))
FAIL = Job(int, ("x",))


def right(reason: object) -> Job:
    return Job(Grade, (Verdict.RIGHT, str(reason)))


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2, seconds=1.0, memory_mib=512) as opened:
        yield opened


def until(true: Callable[[], bool], limit_s: float = 20.0) -> None:
    """Wait until it holds; fail after the limit."""
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, "it never came to hold"
        threading.Event().wait(0.05)


def children_of(pid: int) -> set[int]:
    """Living child processes, from /proc."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[1]) == pid and fields[0] != "Z":
                found.add(int(entry.name))
    return found


def test_grade_many_jobs_come_back_in_their_order(pool: Pool) -> None:
    grades = pool.grade([right(number) for number in range(2_000)])
    assert [grade.reason for grade in grades] == [str(number) for number in range(2_000)]
    assert {grade.verdict for grade in grades} == {Verdict.RIGHT}
    assert pool.grade([]) == []


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (HANG, "timed out after 1 s"),
        (HOG, "timed out after 1 s"),
        (CRASH, "the grading process ended, killed by signal 11"),
        (LEAVE, "the grading process ended, status 3"),
        (EAT, "out of memory: more than 512 MiB"),
        (FAIL, "the grader failed with ValueError: invalid literal"),
        (Job(len, ("not a grade",)), "the grader failed with TypeError"),
        (Job(sys.exit, (0,)), "the grader failed with SystemExit"),
    ],
    ids=["hang", "hog", "crash", "leave", "eat", "fail", "no grade", "exit"],
)
def test_grade_a_job_that_goes_wrong_is_not_graded_and_harms_no_other(pool: Pool, job: Job, reason: str) -> None:
    jobs = [right(number) if number % 4 else job for number in range(12)]
    grades = pool.grade(jobs)
    for number, grade in enumerate(grades):
        if number % 4:
            assert grade == (Verdict.RIGHT, str(number))
        else:
            assert grade.verdict is Verdict.NOT_GRADED
            assert grade.reason.startswith(reason)


def test_grade_jobs_that_hang_cost_their_limit_and_no_more(pool: Pool) -> None:
    pool.grade([right(0)])
    start = time.monotonic()
    assert {grade.verdict for grade in pool.grade([HANG] * 4)} == {Verdict.NOT_GRADED}
    assert time.monotonic() - start < 2 * 1.0 + 3  # two at a time, two times the limit


def test_grade_a_job_of_many_bytes_is_graded_and_one_of_too_many_is_not(pool: Pool) -> None:
    small, large, too_large = pool.grade([right("x"), right("y" * 4_000_000), right("z" * (MAX_JOB_BYTES + 1))])
    assert small == (Verdict.RIGHT, "x")
    assert large == (Verdict.RIGHT, "y" * 300)  # a reason is kept short
    assert too_large.verdict is Verdict.NOT_GRADED
    assert too_large.reason.startswith("a job of 16,777,")


def test_grade_a_grader_that_is_no_function_of_a_module_is_an_error_that_says_so(pool: Pool) -> None:
    with pytest.raises(RewardError, match="a grader is a function of a module"):
        pool.grade([Job(lambda: Grade(Verdict.RIGHT, ""), ())])
    assert pool.grade([right(1)]) == [(Verdict.RIGHT, "1")]


def test_grade_from_several_threads_gives_each_its_own(pool: Pool) -> None:
    found: dict[int, list[Grade]] = {}

    def ask(name: int) -> None:
        found[name] = pool.grade([right(f"{name}/{number}") for number in range(200)])

    threads = [threading.Thread(target=ask, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert {name: [grade.reason for grade in grades] for name, grades in found.items()} == {
        name: [f"{name}/{number}" for number in range(200)] for name in range(4)
    }


def test_grade_when_the_process_that_forks_is_killed_goes_on_with_a_new_one() -> None:
    before = children_of(os.getpid())
    with Pool(1, seconds=2.0) as opened:
        opened.grade([right(0)])
        (nursery,) = children_of(os.getpid()) - before
        os.kill(nursery, signal.SIGKILL)
        assert opened.grade([right(1)]) == [(Verdict.RIGHT, "1")]


def test_grade_after_an_idle_worker_was_killed_blames_no_job() -> None:
    before = children_of(os.getpid())
    with Pool(2, seconds=2.0) as opened:
        opened.grade([right(0)])
        (nursery,) = children_of(os.getpid()) - before
        for worker in children_of(nursery):
            os.kill(worker, signal.SIGKILL)
        until(lambda: not children_of(nursery))
        assert opened.grade([right(number) for number in range(4)]) == [(Verdict.RIGHT, str(number)) for number in range(4)]


class UnkindError(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def raise_unkind() -> Grade:
    raise UnkindError


def return_twice() -> Grade:
    """A grader that forks, and both sides go on as if they were alone."""
    os.fork()
    return Grade(Verdict.RIGHT, "twice")


def write_into_sockets(text: bytes) -> Grade:
    """What a broken library could do: bytes where grades are sent."""
    for descriptor in range(3, 32):
        with contextlib.suppress(OSError):
            os.write(descriptor, text)
    return Grade(Verdict.WRONG, "honest")


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (Job(raise_unkind, ()), "the grader failed with "),
        (Job(write_into_sockets, (struct.pack("=I", 6) + b"?bogus",)), "the grading process sent what is no grade"),
        (Job(write_into_sockets, (struct.pack("=I", 0),)), "the grading process sent what is no grade"),
        (Job(write_into_sockets, (b"\xff" * 40,)), "the grading process sent what is no grade"),
    ],
    ids=["error without words", "no verdict", "no message", "no length"],
)
def test_grade_a_process_that_sends_nonsense_is_not_graded_and_harms_no_other(
    pool: Pool, job: Job, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    grades = pool.grade([right(0), job, right(1), right(2)])
    assert (grades[0], grades[2], grades[3]) == tuple((Verdict.RIGHT, str(number)) for number in range(3))
    assert grades[1].verdict is Verdict.NOT_GRADED
    assert grades[1].reason.startswith(reason)
    assert "Traceback" not in capfd.readouterr().err


def test_grade_a_grader_that_forks_gives_one_grade_and_no_process_twice() -> None:
    with Pool(1, seconds=2.0) as opened:
        grades = opened.grade([right(0), *[Job(return_twice, ())] * 40, right(1), right(2)])
    assert [grade.reason for grade in grades] == ["0", *["twice"] * 40, "1", "2"]


class NoPickle:
    def __getstate__(self) -> object:
        raise ValueError("not this one")


def nested(depth: int) -> list[object]:
    found: list[object] = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize("argument", [NoPickle(), nested(100_000), threading.Lock()], ids=["refuses", "too deep", "a lock"])
def test_grade_arguments_that_cannot_be_sent_are_an_error_of_rewards(pool: Pool, argument: object) -> None:
    with pytest.raises(RewardError, match="a grading job cannot be sent to its process"):
        pool.grade([Job(Grade, (Verdict.RIGHT, argument))])
    assert pool.grade([right(1)]) == [(Verdict.RIGHT, "1")]


def test_pool_used_after_it_was_closed_says_so() -> None:
    opened = Pool(1)
    opened.close()
    for jobs in ([], [right(0)]):
        with pytest.raises(RewardError, match=r"the pool is closed.*make another"):
            opened.grade(jobs)


@pytest.mark.parametrize("files", range(12))
def test_pool_with_room_for_few_more_open_files_starts_or_is_an_error_of_rewards(files: int, room_for: RoomFor) -> None:
    refused = ""
    with room_for(files):
        try:
            Pool(1).close()
        except RewardError as error:
            refused = str(error)
    assert not refused or "open files" in refused
    assert refused or files > 2
    assert not refused or files < 9


@pytest.mark.parametrize("files", range(3))
def test_grade_with_room_for_few_more_open_files_grades_or_is_an_error_of_rewards_and_the_pool_stays_whole(
    files: int, room_for: RoomFor
) -> None:
    with Pool(1, seconds=2.0) as opened:
        opened.grade([right(0), LEAVE])
        with room_for(files):
            try:
                answered = opened.grade([LEAVE, right(1)])[1].reason
            except RewardError as error:
                answered = str(error)
        assert answered == "1" or "open files" in answered
        assert opened.grade([right(2)]) == [(Verdict.RIGHT, "2")]


def kill_what_forked_me() -> Grade:
    parent = os.getppid()
    if b"_nursery" in Path(f"/proc/{parent}/cmdline").read_bytes():
        os.kill(parent, signal.SIGKILL)
    signal.pause()
    return Grade(Verdict.RIGHT, "")


@pytest.mark.slow
def test_pool_whose_jobs_end_what_forks_them_says_so_and_grades_others_afterwards() -> None:
    with Pool(2, seconds=30.0) as opened:
        for _ in range(2):
            with pytest.raises(RewardError, match="grading processes cannot be kept running"):
                opened.grade([Job(kill_what_forked_me, ())] * 4)
            assert opened.grade([right(number) for number in range(4)]) == [(Verdict.RIGHT, str(number)) for number in range(4)]


def grade_until_interrupted(pool: Pool, seconds: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, seconds, 5.0)  # once more, should a finaliser swallow the first
    while True:
        pool.grade([LEAVE, right(1), CRASH, LEAVE] * 8)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # a socket that Ctrl-C keeps from getting a name
def test_pool_interrupted_at_any_moment_grades_as_before_and_kills_only_its_own() -> None:
    """Ctrl-C 60 times, at moments spread over forking, grading and killing."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    earlier = signal.signal(signal.SIGALRM, interrupt)
    before = children_of(os.getpid())
    drawn = random.Random(5)
    try:
        with Pool(3, seconds=5.0) as opened:
            opened.grade([right(0)])
            for _ in range(60):
                with pytest.raises(KeyboardInterrupt):
                    grade_until_interrupted(opened, drawn.uniform(0.0005, 0.06))
                signal.setitimer(signal.ITIMER_REAL, 0)
                assert [grade.reason for grade in opened.grade([right(number) for number in range(6)])] == list("012345")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)
    assert children_of(os.getpid()) == before


def test_pool_that_cannot_start_is_an_error_and_no_hang() -> None:
    with Pool(1, warm_up=[FAIL]) as opened, pytest.raises(RewardError, match="grading processes cannot be kept running"):
        opened.grade([right(0)])


def test_pool_closed_twice_leaves_no_process() -> None:
    before = children_of(os.getpid())
    opened = Pool(2)
    opened.grade([right(0)])
    (nursery,) = children_of(os.getpid()) - before
    workers = children_of(nursery)
    assert len(workers) == 2
    opened.close()
    opened.close()
    assert children_of(os.getpid()) == before
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))


def test_pool_of_a_caller_that_is_killed_ends_with_it_even_in_the_middle_of_jobs() -> None:
    script = (
        "import sys\nfrom stages.rewards.pool import Job, Pool\nimport signal\n"
        "pool = Pool(2, seconds=600)\nprint('up', flush=True)\n"
        "pool.grade([Job(signal.pause, ()), Job(pow, (3, 10**9))])\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path))}
    with subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE) as caller:
        assert caller.stdout is not None
        caller.stdout.readline()
        until(lambda: any(len(children_of(child)) == 2 for child in children_of(caller.pid)))
        (nursery,) = children_of(caller.pid)
        workers = children_of(nursery)
        caller.kill()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (nursery, *workers)))


def test_hostile_texts_that_ship_are_many_and_all_different() -> None:
    assert len({text_of(row) for row in HOSTILE}) == len(HOSTILE) > 80


def largest_child_mib() -> float:
    """Peak resident size of the largest process among all descendants that have ended."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024


def text_of(row: dict[str, object]) -> str:
    return f"{row['start']}{str(row['unit']) * int(str(row['times']))}{row['end']}"


def hostile_inputs(count: int, seed: int) -> list[tuple[str, str]]:
    """Answers and gold answers: the shipped texts, pieces of them put together, and one beside another."""
    drawn = random.Random(seed)
    texts = [text_of(row) for row in HOSTILE]
    units = [str(row["unit"]) for row in HOSTILE] + list("0123456789+-*/^_{}()[]|!%'\"$\\,.;:=<>& xyzπ√∞±°½²\n\t\x00")
    golds = [
        "7",
        r"\frac{1}{2}",
        "x^2+1",
        r"\{1,2\}",
        "(1,2)",
        "[0,1)",
        "x=3",
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
        "10 cm",
        "east",
        r"\sqrt{2}",
    ]
    inputs = [(text, "7") for text in texts] + [("7", text) for text in texts]
    while len(inputs) < count:
        pieces = "".join(drawn.choice(units) * drawn.choice((1, 1, 1, 2, 9)) for _ in range(drawn.randint(1, 40)))
        cut = drawn.choice(texts)[: drawn.randint(1, 400)]
        inputs.append((drawn.choice((pieces, cut, cut + pieces)), drawn.choice((*golds, drawn.choice(texts)[:200], pieces[::2]))))
    return inputs[:count]


@pytest.mark.slow
def test_equivalent_on_ten_thousand_hostile_inputs_neither_hangs_nor_breaks_the_pool(capsys: pytest.CaptureFixture[str]) -> None:
    memory_mib = 512
    inputs = hostile_inputs(INPUTS, seed=5)
    start, before_mib = time.monotonic(), largest_child_mib()
    with math_pool(seconds=2.0, memory_mib=memory_mib) as opened:
        grades = opened.grade([Job(equivalent, pair) for pair in inputs])
        assert opened.grade([Job(equivalent, (r"\frac{2}{4}", "0.5"))])[0].verdict is Verdict.RIGHT
    seconds = time.monotonic() - start
    peak_mib = largest_child_mib()
    reasons = Counter(grade.reason.split(":")[0][:40] for grade in grades if grade.verdict is Verdict.NOT_GRADED).most_common(8)
    failures = [(pair, grade) for pair, grade in zip(inputs, grades, strict=True) if grade.reason.startswith("the grad")]
    with capsys.disabled():
        print(f"\n{INPUTS:,} hostile inputs in {seconds:.0f} s, largest process {peak_mib:.0f} MiB; not graded: {dict(reasons)}")
    assert len(grades) == INPUTS
    assert failures == []
    assert peak_mib < 256 + memory_mib or peak_mib == before_mib  # other tests' processes may have been larger
    assert sum(grade.verdict is Verdict.RIGHT for grade in grades[: 2 * len(HOSTILE)]) == 0


@pytest.fixture(scope="module")
def grading() -> Iterator[Pool]:
    with math_pool(1, seconds=2.0, memory_mib=512) as opened:
        yield opened


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.text(max_size=60)
            | st.from_regex(r"(\\(frac|sqrt|sum|int|pm|text|left\(|begin\{pmatrix\})|[0-9x^_{}()+*/!,= -]){1,30}", fullmatch=True),
            st.text(min_size=1, max_size=20) | st.sampled_from(["7", r"\frac12", r"\{1,2\}", "[0,1)", "x=3"]),
        ),
        min_size=5,
        max_size=20,
    )
)
@pytest.mark.slow
def test_equivalent_on_any_text_gives_a_verdict_and_never_fails(grading: Pool, inputs: list[tuple[str, str]]) -> None:
    for pair, grade in zip(inputs, grading.grade([Job(equivalent, pair) for pair in inputs]), strict=True):
        assert not grade.reason.startswith("the grad"), (pair, grade)
