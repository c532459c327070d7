"""What graders and rewards must show before a policy is trained on them; what they cannot show, a policy will find.

Gold answers earn full marks; pairs that are equivalent are graded right and pairs that are not are never; a suite of attacks
earns nothing; a second grader agrees; little is left ungraded; and a grade takes little time. The shipped rows are under
`datasets/` (`equivalence.jsonl`, `audit/`), rows of a user's own in files of the same form. A JSONL row is one of

    {"gold": "1/2", "answer": "0.5", "equivalent": true, "form": "fraction"}
    {"attack": "many boxes", "question": "3+4", "gold": "7", "completion": "...", "must_not_earn": ["accuracy", "format"]}
    {"attack": "exit", "program": "...", "stdin": "", "expected": "7"}

Everything under audit is given as functions, so a weak grader can be put in and must be caught. Where answers are programs,
the sandbox is part of the grader and is looked at too.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field, ValidationError, model_validator

from stages.chat import Reply, parse_reply
from stages.config import AnswerType, AuditConfig, Settings
from stages.errors import DataError, RewardError
from stages.rewards.code import CodeTests, Test, grade_program
from stages.rewards.grading import Grade, Verdict, boxed_answers
from stages.rewards.sandbox import DEFAULT_LIMITS, require_sandbox
from stages.rewards.scoring import Prompt, Rollout, Scorer, Scores
from stages.rewards.tasks import gold_reply

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from stages.records import Recorder

DATASETS = Path(__file__).resolve().parents[2] / "datasets"
CODE_LIMIT_S = 30.0
"""Longest wait for the grade of one hostile program."""
SECOND_ROWS = 200
"""Answers, about, that the second grader sees."""
_EXAMPLES = 5
_SHOWN = 100
_PROGRAM_LIMITS = DEFAULT_LIMITS._replace(cpu_s=2, wall_s=4.0)

Part = Literal["accuracy", "format", "language", "length", "overlong", "repetition", "missing_stop"]
"""A part of the reward that an attack may be held against."""


class EquivalencePair(Settings):
    """Two answers, and whether they are the same."""

    gold: str = Field(description="The reference.")
    answer: str = Field(description="What stands in the box.")
    equivalent: bool = Field(description="Whether a grader must say right, or must not.")
    form: str = Field("", description="What the pair is about, for people.")
    answer_type: AnswerType = Field("math", description="Type of the answer.")


class Attack(Settings):
    """A reply that must not earn some parts of the reward, or must earn some."""

    attack: str = Field(description="What it tries, for people.")
    question: str = Field("", description="The question.")
    gold: str = Field(description="The gold answer.")
    completion: str = Field(description="The whole reply, with its think block.")
    thinking: bool = Field(True, description="The mode that was asked for.")
    stopped: bool = Field(True, description="Whether it ended by itself.")
    answer_type: AnswerType = Field("text", description="Type of the answer.")
    grading: str = Field("", description="What the type needs beside the gold answer, a JSON object as text.")
    must_not_earn: tuple[Part, ...] = Field((), description="Reward parts that must be 0 or less.")
    must_earn: tuple[Part, ...] = Field((), description="Reward parts that must be more than 0.")

    @model_validator(mode="after")
    def _says_something(self) -> Attack:
        if not self.must_not_earn and not self.must_earn:
            raise ValueError("it says neither what it must not earn nor what it must")
        return self


class CodeAttack(Settings):
    """A program that must not be graded right, and must not reach out of its sandbox; or an honest one."""

    attack: str = Field(description="What it tries, for people.")
    program: str = Field(description="Its text; CANARY stands for the path of a file that must not appear.")
    stdin: str = Field("", description="Its input.")
    expected: str = Field(description="The output that a right program prints.")
    honest: bool = Field(False, description="No attack: it must be graded right, or the grader of programs does not work here.")


Row = EquivalencePair | Attack | CodeAttack

CodeGrader = Callable[[str, str, str], Grade]
"""Program, input, expected output -> grade."""
SecondGrader = Callable[[Sequence[tuple[str, str]]], list[Grade]]
"""Pairs of answer and gold answer -> grades, by other means than the first grader's."""


class Check(NamedTuple):
    """One thing that was looked at."""

    name: str
    metric: str
    """Name of `value` among the metrics."""
    rows: int
    failed: int
    value: float
    rule: str
    passed: bool
    examples: tuple[str, ...]
    """The first rows that failed, with what happened."""


class Audit(NamedTuple):
    """What was found of one scorer."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    def metrics(self) -> dict[str, float]:
        """What was measured, by metric name."""
        return {check.metric: check.value for check in self.checks}

    def require(self, where: str) -> None:
        """Raise RewardError with the checks that failed and their first examples."""
        if self.passed:
            return
        lines = [
            f"{check.name}: {check.failed} of {check.rows} ({check.value:.3g}; the rule is {check.rule})"
            + "".join(f"\n  {example}" for example in check.examples)
            for check in self.checks
            if not check.passed
        ]
        raise RewardError(
            f"{where}: the audit of its rewards failed, so a policy would be trained on wrong ones; mend the grader or the rows, or "
            "set `audit.blocks: false` to train all the same. Look closer with: posttrain audit\n" + "\n".join(lines)
        )


# ---- rows -----------------------------------------------------------------------------------


def shipped_rows() -> list[Row]:
    """The rows that come with the project. Raises DataError when one of their files is missing."""
    files = ("equivalence.jsonl", "audit/pairs.jsonl", "audit/attacks.jsonl", "audit/code_attacks.jsonl")
    return [row for name in files for row in read_audit_rows(DATASETS / name)]


def of_types(rows: Sequence[Row], types: Set[str]) -> list[Row]:
    """The rows about these types of answer; attacks on answers as text are attacks on mathematics too."""
    found: list[Row] = []
    for row in rows:
        if isinstance(row, CodeAttack):
            found += [row] if "code" in types else []
        elif isinstance(row, Attack) and row.answer_type == "text":
            found += [row.model_copy(update={"answer_type": kind}) for kind in ("text", "math") if kind in types]
        elif row.answer_type in types:
            found.append(row)
    return found


def read_audit_rows(path: Path) -> list[Row]:
    """The rows of a file. Raises DataError naming file, line and rule; a file without a row checks nothing, and is one too."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}); the rule is JSONL in UTF-8; mend `audit.rows`, or restore the file") from error
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
            kind = CodeAttack if "program" in content else Attack if "completion" in content else EquivalencePair
            rows.append(kind.model_validate(content))
        except (ValueError, TypeError) as error:
            faults = error.errors() if isinstance(error, ValidationError) else []
            what = "; ".join(": ".join(filter(None, (".".join(map(str, fault["loc"])), fault["msg"]))) for fault in faults) or str(error)
            raise DataError(f"{path}, line {number}: {what}; see stages/rewards/audit.py for the three kinds of rows") from error
    if not rows:
        raise DataError(f"{path} has no rows, so it would check nothing; add some, or take it out of `audit.rows`")
    return rows


# ---- the audit ------------------------------------------------------------------------------


def gate(score: Scorer, types: Set[str], config: AuditConfig, recorder: Recorder, where: str) -> None:
    """Audit a stage's scorer on the shipped rows and the user's, record what was measured, and refuse to go on when it fails.

    Only rows of the `types` of answer that the stage grades are looked at; for programs, the sandbox is attacked too. Raises
    RewardError unless `config.blocks` is off, SandboxError on a host that cannot run programs, and DataError for a file of
    the user's of which nothing would be looked at.
    """
    if "code" in types:
        require_sandbox()
    rows = of_types(shipped_rows(), types)
    for path in config.rows:
        read = read_audit_rows(path)
        if not (own := of_types(read, types)):
            kinds = ", ".join(sorted({"code" if isinstance(row, CodeAttack) else row.answer_type for row in read}))
            raise DataError(
                f"{path}: its rows are about answers of the type {kinds}, and {where} grades {', '.join(sorted(types))}, so they would "
                "check nothing; set `answer_type` in the rows, or take the file out of `audit.rows`"
            )
        rows += own
    found = audit(score, rows, config=config)
    if "code" in types:
        found = Audit((*found.checks, check_programs([row for row in rows if isinstance(row, CodeAttack)], grade_attack)))
    recorder.metrics(0, found.metrics())
    if config.blocks:
        found.require(where)


def audit(
    score: Scorer,
    rows: Sequence[Row],
    golds: Sequence[Prompt] = (),
    *,
    config: AuditConfig,
    second: SecondGrader | None = None,
) -> Audit:
    """Look at a scorer: what it pays, to whom, how often it cannot say, and how long it takes.

    Rows about programs are for `check_programs`. A scorer that raises has failed on that row.
    """
    pairs = [row for row in rows if isinstance(row, EquivalencePair)]
    attacks = [row for row in rows if isinstance(row, Attack)]
    gold_rollouts = [Rollout(prompt, reply, 1, stopped=True) for prompt in golds if (reply := gold_reply(prompt.task)) is not None]
    pair_rollouts = [_pair_rollout(index, pair) for index, pair in enumerate(pairs)]
    started = time.perf_counter()
    gold_scores, pair_scores = _scored(score, gold_rollouts), _scored(score, pair_rollouts)
    graded = len(gold_rollouts) + len(pair_rollouts)
    ms = 1000 * (time.perf_counter() - started) / max(1, graded)
    attack_scores = _scored(score, [_attack_rollout(index, row) for index, row in enumerate(attacks)])

    checks = []
    if gold_rollouts:
        checks.append(_gold_check(gold_rollouts, gold_scores))
    if pairs:
        checks += _pair_checks(pairs, pair_scores, config)
    if attacks:
        checks.append(_attack_check(attacks, attack_scores))
    if graded and second is not None:
        checks.append(_second_check([*gold_rollouts, *pair_rollouts], [*gold_scores, *pair_scores], second, config.max_disagreement))
    if graded:
        checks.append(_not_graded_check([*gold_rollouts, *pair_rollouts], [*gold_scores, *pair_scores], config.max_not_graded_share))
        slow = ms > config.max_ms_per_grade
        rule = f"a mean of at most {config.max_ms_per_grade:g} ms"
        checks.append(Check("time per grade", "audit/ms_per_grade", graded, graded * slow, round(ms, 3), rule, not slow, ()))
    return Audit(tuple(checks))


class _Score(NamedTuple):
    """One rollout's parts and grade; `broke` says what the scorer raised in their place."""

    parts: dict[str, float]
    grade: Grade
    broke: str = ""


def _scored(score: Scorer, rollouts: Sequence[Rollout]) -> list[_Score]:
    """Scores of rollouts; when the scorer raises, each by itself."""
    if not rollouts:
        return []
    try:
        return _each(score(rollouts), len(rollouts))
    except Exception as error:  # noqa: BLE001 - a scorer under audit: whatever it raises is a finding
        if len(rollouts) == 1:
            return [
                _Score({}, Grade(Verdict.NOT_GRADED, "the grader broke"), f"the grader broke: {type(error).__name__}: {error}"[:_SHOWN])
            ]
        return [found for item in rollouts for found in _scored(score, [item])]


def _each(scores: Scores, count: int) -> list[_Score]:
    return [_Score({part: values[i] for part, values in scores.parts.items()}, scores.grades[i]) for i in range(count)]


def _pair_rollout(index: int, pair: EquivalencePair) -> Rollout:
    prompt = Prompt("", f"pair {index}", "", pair.gold, True, answer_type=pair.answer_type)
    return Rollout(prompt, Reply("x", f"\\boxed{{{pair.answer}}}"), 1, stopped=True)


def _attack_rollout(index: int, row: Attack) -> Rollout:
    prompt = Prompt("", f"attack {index}", row.question, row.gold, row.thinking, answer_type=row.answer_type, grading=row.grading)
    return Rollout(prompt, parse_reply(row.completion), max(1, len(row.completion) // 4), row.stopped, row.completion)


def _gold_check(rollouts: Sequence[Rollout], scores: Sequence[_Score]) -> Check:
    failed = [
        f"problem {item.prompt.problem_id}, gold answer {_short(item.prompt.gold)}: {found.broke or found.grade.reason}"
        for item, found in zip(rollouts, scores, strict=True)
        if found.grade.verdict is not Verdict.RIGHT or not _earned(found, "accuracy")
    ]
    share = 1 - len(failed) / len(rollouts)
    return _check("gold answers earn full marks", "audit/gold_right", len(rollouts), failed, share, "all")


def _pair_checks(pairs: Sequence[EquivalencePair], scores: Sequence[_Score], config: AuditConfig) -> list[Check]:
    missed: list[str] = []
    wrongly: list[str] = []
    for pair, found in zip(pairs, scores, strict=True):
        said = found.grade.verdict is Verdict.RIGHT
        paid = _earned(found, "accuracy") if pair.equivalent else not _earned_nothing(found, "accuracy")
        if said != pair.equivalent or paid != (pair.equivalent and said):
            earns = found.parts.get("accuracy", 0.0)
            what = f"{found.grade.verdict}, {found.grade.reason}" + ("" if paid == said else f", yet its accuracy is {earns:g}")
            (missed if pair.equivalent else wrongly).append(f"{_short(pair.answer)} for {_short(pair.gold)}: {found.broke or what}")
    same = sum(pair.equivalent for pair in pairs)
    recall = 1 - len(missed) / same if same else 1.0
    enough, rule = recall >= config.min_recall, f"a share of at least {config.min_recall:g}"
    return [
        Check("equivalent answers are right", "audit/recall", same, len(missed), recall, rule, enough, _shown(missed)),
        _check("other answers are not", "audit/false_positives", len(pairs) - same, wrongly, float(len(wrongly)), "none"),
    ]


def _attack_check(attacks: Sequence[Attack], scores: Sequence[_Score]) -> Check:
    failed = []
    for row, found in zip(attacks, scores, strict=True):
        paid = [part for part in row.must_not_earn if not _earned_nothing(found, part)]
        unpaid = [part for part in row.must_earn if not _earned(found, part)]
        what = [*(f"earns {part}" for part in paid), *(f"does not earn {part}" for part in unpaid)]
        if what or found.broke:
            failed.append(f"{row.attack} ({row.answer_type}), {_short(row.completion)}: {found.broke or ' and '.join(what)}")
    return _check("attacks earn nothing", "audit/attacks_paid", len(attacks), failed, float(len(failed)), "none")


def _second_check(rollouts: Sequence[Rollout], scores: Sequence[_Score], second: SecondGrader, limit: float) -> Check:
    """Look at about SECOND_ROWS of the answers in mathematics that the first grader decided on, evenly spread."""
    asked = [
        (boxes[0], item.prompt.gold, found.grade)
        for item, found in zip(rollouts, scores, strict=True)
        if item.prompt.answer_type == "math"
        and found.grade.verdict is not Verdict.NOT_GRADED
        and (boxes := boxed_answers(item.reply.response))
    ]
    asked = asked[:: max(1, len(asked) // SECOND_ROWS)]
    others = second([(answer, gold) for answer, gold, _ in asked]) if asked else []
    compared = [(*item, other) for item, other in zip(asked, others, strict=True) if other.verdict is not Verdict.NOT_GRADED]
    failed = [
        f"{_short(answer)} for {_short(gold)}: {grade.verdict} ({grade.reason}), the second grader says {other.verdict} ({other.reason})"
        for answer, gold, grade, other in compared
        if grade.verdict is not other.verdict
    ]
    share = len(failed) / len(compared) if compared else 0.0
    rule, passed = f"a share of at most {limit:g}", share <= limit
    return Check("a second grader agrees", "audit/disagreement", len(compared), len(failed), share, rule, passed, _shown(failed))


def _not_graded_check(rollouts: Sequence[Rollout], scores: Sequence[_Score], limit: float) -> Check:
    failed = [
        f"{_short(item.reply.response)} for {_short(item.prompt.gold)}: {found.broke or found.grade.reason}"
        for item, found in zip(rollouts, scores, strict=True)
        if found.grade.verdict is Verdict.NOT_GRADED
    ]
    share = len(failed) / len(rollouts)
    rule = f"a share of at most {limit:g}"
    return Check(
        "little is left ungraded",
        "audit/not_graded_share",
        len(rollouts),
        len(failed),
        share,
        rule,
        share <= limit,
        _shown(failed),
    )


def _earned(found: _Score, part: str) -> bool:
    """Whether a part was paid. What was not graded is paid nothing, and not a number is neither something nor nothing."""
    return found.grade.verdict is not Verdict.NOT_GRADED and found.parts.get(part, 0.0) > 0


def _earned_nothing(found: _Score, part: str) -> bool:
    return found.parts.get(part, 0.0) <= 0


def _check(name: str, metric: str, rows: int, failed: Sequence[str], value: float, rule: str) -> Check:
    return Check(name, metric, rows, len(failed), value, rule, not failed, _shown(failed))


def _shown(failed: Sequence[str]) -> tuple[str, ...]:
    """The first examples, without what a terminal would obey or could not write."""
    return tuple("".join(c if c.isprintable() else ascii(c)[1:-1] for c in example) for example in failed[:_EXAMPLES])


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


# ---- programs -------------------------------------------------------------------------------


def grade_attack(program: str, stdin: str, expected: str) -> Grade:
    """The project's own grader of programs, with limits that let an audit of many programs end soon."""
    return grade_program(program, CodeTests(tests=(Test(input=stdin, expected=expected),)), _PROGRAM_LIMITS)


def check_programs(programs: Sequence[CodeAttack], code: CodeGrader) -> Check:
    """Look at a grader of programs: none of the attacks is graded right or reaches out of its sandbox, and every honest one is right."""
    failed = [f"{row.attack}: {what}" for row in programs if (what := _reached(row, code))]
    return _check("hostile programs reach nothing", "audit/programs_paid", len(programs), failed, float(len(failed)), "none")


def _reached(row: CodeAttack, code: CodeGrader) -> str | None:
    """What a hostile program got out of a grader; None for nothing. The grader runs in a child, since it may be the program's victim."""
    with tempfile.TemporaryDirectory(prefix="posttrain-audit-") as folder:
        canary = Path(folder) / "canary"
        mine, theirs = multiprocessing.get_context("fork").Pipe(duplex=False)
        program = row.program.replace("CANARY", str(canary))
        child = multiprocessing.get_context("fork").Process(target=_grade_in_child, args=(theirs, code, program, row.stdin, row.expected))
        child.start()
        theirs.close()
        try:
            grade = mine.recv() if mine.poll(CODE_LIMIT_S) else "it held up the grader"
        except EOFError:
            grade = "it ended the grader's process"
        child.kill()
        child.join()
        mine.close()
        if canary.exists():
            return "it wrote a file outside"
    if isinstance(grade, str):
        return grade
    if (grade.verdict is Verdict.RIGHT) == row.honest:
        return None
    return f"it was graded {grade.verdict} ({grade.reason})"


def _grade_in_child(out: Connection, code: CodeGrader, program: str, stdin: str, expected: str) -> None:
    try:
        found: Any = code(program, stdin, expected)
    except BaseException as error:  # noqa: BLE001 - a program under audit may raise anything, SystemExit too
        found = f"it broke the grader: {type(error).__name__}"
    out.send(found)


def prompts_of(rows: Iterable[Mapping[str, Any]]) -> list[Prompt]:
    """Problems as prompts without a text, for their gold answers."""
    return [Prompt.of(row, "", thinking=True) for row in rows]
