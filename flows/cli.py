"""The `posttrain` command. Light until something has to run: `plan`, `--help` and a run that finds everything
finished import neither prefect, mlflow nor torch.

Exit status: 0 fine, 1 a stage or a server failed, 2 the recipe or the command is wrong, 130 Ctrl-C or cancelled.
"""

from __future__ import annotations

import errno
import json
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.history import LATEST, find_run, read_runs
from flows.plan import Step, home_folder, make_plan, read_state, remember, results_of
from flows.recipe import Recipe, load_recipe, recipe_names
from flows.request import Job, Request, prepare, prepare_sweep, set_options
from stages.errors import ArtifactError, ConfigError, PosttrainError, RewardError

if TYPE_CHECKING:
    from flows.post_training import Outcome
    from flows.scores.ablation import AblationTable
    from flows.scores.comparison import Comparison
    from flows.summary import Totals
    from flows.terminal import Screen

app = typer.Typer(
    help="The post-training recipe, from curation to the ablation table. Start with: posttrain run tiny",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

RecipeName = Annotated[str, typer.Argument(help=f"One of {', '.join(recipe_names())}, or the path of a .yaml file.", metavar="RECIPE")]
RecipeOption = Annotated[str, typer.Option("--recipe", help="The recipe that says what the stage reads.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a setting; can be given often. Example: --set reasoning_rl.learning_rate=1e-4", metavar="KEY=VALUE"),
]
From = Annotated[
    str | None, typer.Option("--from", help="Only this stage and every stage that reads it, directly or not.", metavar="STAGE")
]
Of = Annotated[
    str | None,
    typer.Option(
        "--of",
        help="Take settings, and the stages that are not run, from this earlier run: tiny-3, latest, or an MLflow or Prefect run id.",
        metavar="RUN",
    ),
]
Force = Annotated[
    bool, typer.Option("--force", help="Run what was asked for even if it is finished; the earlier result is set aside, not lost.")
]
Drift = Annotated[
    list[str] | None,
    typer.Option(
        "--accept-drift",
        help="Reuse the last result of this stage although its code or settings have changed; the run is marked. Can be given often.",
        metavar="STAGE",
    ),
]
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)
Json = Annotated[bool, typer.Option("--json", help="Write JSON to standard output, for scripts.")]


@app.command()
def run(
    recipe: RecipeName,
    set_: Set = None,
    from_: From = None,
    of: Of = None,
    force: Force = False,
    accept_drift: Drift = None,
    as_json: Json = False,
) -> None:
    """Run a recipe; what is finished already is reused.

    Interrupted or failed, the same command continues. Servers for Prefect and MLflow are started for
    the time of the run unless PREFECT_API_URL and MLFLOW_TRACKING_URI name others.

    Example: posttrain run tiny --set cold_start.learning_rate=5e-4
    """
    with _reported(as_json) as screen:
        started = time.monotonic()
        job = prepare(_request(recipe, set_, from_, of, force, accept_drift), home_folder())
        screen.plan(job.steps)
        if not job.to_run and job.is_whole:
            _up_to_date(screen, job.whole, job.steps, as_json=as_json)
            return
        _show(screen, _conduct(screen, job, started), as_json=as_json)


@app.command()
def plan(
    recipe: RecipeName,
    set_: Set = None,
    from_: From = None,
    of: Of = None,
    force: Force = False,
    accept_drift: Drift = None,
    as_json: Json = False,
) -> None:
    """Say what a run would reuse, resume and run, and why. Changes nothing.

    Example: posttrain plan tiny --set reasoning_rl.learning_rate=1e-4
    """
    with _reported(as_json) as screen:
        job = prepare(_request(recipe, set_, from_, of, force, accept_drift), home_folder())
        if as_json:
            _write([_as_json(step) for step in job.steps])
        else:
            screen.plan(job.steps)


@app.command()
def stage(
    name: Annotated[str, typer.Argument(help="A stage of the recipe, by the name that `posttrain plan` shows.")],
    recipe: RecipeOption = "tiny",
    set_: Set = None,
    of: Of = None,
    downstream: Annotated[bool, typer.Option("--downstream", help="Also every stage that reads it, directly or not.")] = False,
    force: Force = False,
    accept_drift: Drift = None,
    as_json: Json = False,
) -> None:
    """Run one stage and the evaluation of its model; what it reads comes from finished stages, or from an earlier run.

    With --of, the result stands beside that run's as a variant, and both are compared.

    Example: posttrain stage reasoning_rl --of latest --set reasoning_rl.loss=dr_grpo
    """
    with _reported(as_json) as screen:
        started = time.monotonic()
        asked = _request(recipe, set_, name if downstream else None, of, force, accept_drift)
        job = prepare(asked if downstream else asked.model_copy(update={"only": name}), home_folder())
        screen.plan([step for step in job.steps if step.node.name in job.whole.after(name)])
        if not job.to_run and of is None:
            folder = next(step.folder for step in job.steps if step.node.name == name)
            screen.console.print(f"{name} is up to date: {folder}", soft_wrap=True)
            if as_json:
                _write({"stages": [_as_json(step) for step in job.steps if step.node.name == name]})
            return
        _show(screen, _conduct(screen, job, started), as_json=as_json)


@app.command()
def ablate(
    name: Annotated[str, typer.Argument(help="The stage to vary.", metavar="STAGE")],
    vary: Annotated[
        list[str],
        typer.Option("--vary", help="A setting of the stage and the values to try; can be given often.", metavar="KEY=A,B"),
    ],
    seeds: Annotated[int, typer.Option(help="Training runs a variant, each with a seed of its own.", min=1, max=20)] = 1,
    recipe: RecipeOption = "tiny",
    set_: Set = None,
    of: Of = None,
    compare_at: Annotated[str | None, typer.Option(help="The stage whose evaluation is compared.", metavar="STAGE")] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Run variants of one stage from one upstream and compare them; every combination of values, the first is the baseline.

    Example: posttrain ablate reasoning_rl --vary loss=dapo,dr_grpo --vary group_size=8,16 --seeds 3
    """
    with _reported(as_json) as screen:
        started = time.monotonic()
        asked = _request(recipe, set_, None, of, force, None)
        sweep = prepare_sweep(asked, home_folder(), name, vary, seeds, compare_at)
        for variant, job in zip(sweep.variants, sweep.jobs, strict=True):
            states = ", ".join(f"{step.node.name} {step.action}" for step in job.steps if step.node.name in job.whole.after(name))
            screen.say(f"{variant.name} seed {variant.seed}: {states}")
        from flows.conduct import run_ablation

        outcome = run_ablation(asked, name, vary, seeds=seeds, compare_at=compare_at, screen=screen)
        _show(screen, _timed(outcome, started), as_json=as_json)


@app.command()
def compare(
    runs: Annotated[list[str], typer.Argument(help="Two or more runs, or one ablation: tiny-3 tiny-5. The first is the baseline.")],
    at: Annotated[str | None, typer.Option("--stage", help="The stage whose evaluations are compared.", metavar="STAGE")] = None,
    side_by_side: Annotated[
        bool, typer.Option("--samples", help="Also write samples to MLflow and print the page that shows two variants prompt by prompt.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare runs on their benchmarks: n, interval, paired test, tokens, seconds.

    Without --stage: the stage that an ablation or a rerun was about, else the last one that all have evaluated.

    Example: posttrain compare tiny-1 tiny-2 --stage reasoning_rl
    """
    with _reported(as_json) as screen:
        from flows.scores.comparison import compare as compare_variants
        from flows.summary import lined_up

        records = [find_run(home_folder(), run) for run in runs]
        stage, found = lined_up(home_folder(), records, at)
        comparison = compare_variants(stage, found)
        comparison.render(screen.console)
        page = None
        if side_by_side:
            from flows.scores.side_by_side import show_samples

            page = show_samples(home_folder(), records[0].recipe, found, screen)
        if as_json:
            _write(comparison.to_json() | {"samples": page})


@app.command()
def runs(
    recipe: Annotated[str | None, typer.Argument(help="Only the runs of this recipe, by its name.", metavar="RECIPE")] = None,
    as_json: Json = False,
) -> None:
    """List the runs of this project, newest last: their ids are what --of and `compare` take.

    Example: posttrain runs tiny
    """
    with _reported(as_json) as screen:
        found = read_runs(home_folder(), recipe)
        if as_json:
            _write([record.model_dump(mode="json", exclude={"text"}) for record in found])
        else:
            screen.runs(found)


@app.command()
def up() -> None:
    """Start Prefect, MLflow and what can be started from the Prefect page, and keep them until Ctrl-C.

    The deployments: the recipe, each stage alone, an ablation; each with a form. Example: posttrain up
    """
    with _reported(False) as screen:
        from flows.servers.serving import up as keep_up

        keep_up(home_folder(), say=screen.say, worker=[sys.executable, "-m", "flows.deployments"])


@app.command()
def check(recipe: RecipeName, set_: Set = None) -> None:
    """Check a recipe, its settings and what its graders need of this host, without running a stage.

    Example: posttrain check my_recipe.yaml
    """
    with _reported(False) as screen:
        from flows.audit import require_host

        checked = load_recipe(recipe, set_ or [])
        require_host(checked.nodes)
        screen.console.print(f"{checked.name}: {len(checked.nodes)} stages, {checked.description}".rstrip(", "))


@app.command()
def table(recipe: RecipeName, set_: Set = None, as_json: Json = False) -> None:
    """Show the ablation table of what has finished with these settings.

    Example: posttrain table tiny
    """
    with _reported(as_json) as screen:
        from flows.summary import table_of

        checked = load_recipe(recipe, set_ or [])
        found = table_of(checked, results_of(make_plan(checked, home_folder())))
        if found is None:
            raise ArtifactError(
                f"no evaluation of {checked.name} has finished with these settings in {home_folder()}; "
                f"make one: posttrain run {shlex.quote(recipe)}{set_options(set_ or [])}"
            )
        if as_json:
            _write(found.to_json())
        else:
            screen.table(found)


@app.command()
def claims(
    recipe: RecipeName,
    seeds: Annotated[str, typer.Option(help="Seeds to run the recipe with, comma-separated.")] = "0,1,2",
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Run a recipe with several seeds and judge what it claims about its stages; exit status 1 when a claim fails.

    Finished stages are reused. A claim is judged on the problems of all seeds together, paired.

    Example: posttrain claims tiny --seeds 0,1,2
    """
    with _reported(as_json) as screen:
        from flows.scores.claims import judge, render
        from flows.summary import samples_of

        numbers = _seeds(seeds)
        if not (stated := load_recipe(recipe, set_ or []).claims):
            raise ConfigError(f"the recipe {recipe} states no claims; list them under `claims`")
        samples = []
        for number in numbers:
            screen.say(f"seed {number}")
            job = prepare(Request(recipe=recipe, overrides=(*(set_ or []), f"seed={number}")), home_folder())
            if job.to_run:
                _show(screen, _conduct(screen, job, time.monotonic()), as_json=False)
            samples.append(samples_of(job.whole, results_of(make_plan(job.whole, home_folder()))))
        findings = [judge(claim, samples) for claim in stated]
        render(findings, screen.console)
        if as_json:
            _write([finding._asdict() | {"claim": str(finding.claim)} for finding in findings])
        if not all(finding.holds for finding in findings):
            sys.exit(1)


@app.command()
def audit(
    recipe: Annotated[
        str | None, typer.Argument(help="Audit this recipe's stages and gold answers; without it the shipped graders.", metavar="RECIPE")
    ] = None,
    set_: Set = None,
    no_mlflow: Annotated[bool, typer.Option("--no-mlflow", help="Only print it; start no server and write no run.")] = False,
    as_json: Json = False,
) -> None:
    """Look for what a policy could exploit in its rewards before it does; exit status 1 when a check fails.

    Gold answers, pairs that are equivalent and pairs that are not, attacks, hostile programs, time per grade. Every
    stage that trains on rewards looks at the most of it before its first step. Rows of your own: --set STAGE.audit.rows=[my.jsonl]

    Example: posttrain audit tiny
    """
    with _reported(as_json) as screen:
        from flows.audit import audit_recipe, render, rows_of

        if recipe is None and set_:
            raise ConfigError("--set changes a recipe's settings; name the recipe: posttrain audit tiny --set KEY=VALUE")
        checked = load_recipe(recipe, set_ or []) if recipe is not None else None
        found = audit_recipe(checked, home_folder(), screen.say)
        render(found, screen.console)
        if not no_mlflow:
            from flows.servers.serving import servers

            with servers(home_folder(), say=screen.say) as running:
                from flows.tracking import Tracker

                tracker = Tracker(running.mlflow_url, checked.name if checked else "graders", home_folder())
                if page := tracker.links(tracker.log_audit(rows_of(found))).get("recipe run"):
                    screen.say("`posttrain up` opens it again, at the same address:")
                    screen.links({"MLflow: audit": page})
        if as_json:
            _write(rows_of(found))
        if failed := [item.stage for item in found if not item.audit.passed]:
            raise RewardError(
                f"the audit failed for {', '.join(failed)}; a policy would be trained on wrong rewards; mend what is listed above"
            )


def _seeds(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--seeds {text}: must be whole numbers separated by commas, for instance 0,1,2") from error
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"--seeds {text}: a seed is given twice; one seed counts once")
    return numbers


@app.command()
def sync(as_json: Json = False) -> None:
    """Send to MLflow what it could not take while it was away.

    Example: posttrain sync
    """
    with _reported(as_json) as screen:
        from flows.servers.serving import servers

        with servers(home_folder(), say=screen.say) as running:
            from flows.tracking import Tracker

            done = Tracker.sync(running.mlflow_url, home_folder())
        if as_json:
            _write(done._asdict())
        else:
            screen.console.print(f"{done.sent} sent, {done.left} left")


@app.command()
def sql(
    query: Annotated[
        str | None, typer.Argument(help="A SELECT, or the name of a question (--tables lists them).", metavar="QUERY", show_default=False)
    ] = None,
    values: Annotated[list[str] | None, typer.Argument(help="What the question takes.", metavar="VALUES", show_default=False)] = None,
    tables: Annotated[bool, typer.Option("--tables", help="List the tables of the run and the named questions.")] = False,
    of: Annotated[str | None, typer.Option("--of", help="The run to ask: tiny-3, latest; without it the newest.", metavar="RUN")] = None,
    as_json: Json = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Write CSV to standard output.")] = False,
) -> None:
    """Ask the data of a run in SQL, read-only: problems, dropped rows and why, overlap, pass rates, rollouts, samples.

    Examples: posttrain sql why PROBLEM_ID; posttrain sql funnel; posttrain sql "select rule, count(*) from dropped group by rule"
    """
    with _reported(as_json or as_csv) as screen:
        from flows.questions import Form, answer, opened, show, show_tables, tables_of

        record, files = tables_of(home_folder(), of)
        with opened(files) as database:
            if query is None and not tables:
                raise ConfigError("give a query or a question; `posttrain sql --tables` lists what can be asked")
            form: Form = "json" if as_json else "csv" if as_csv else "table"
            if tables or query is None:
                show_tables(database, record, files, screen.console, form)
            else:
                show(answer(database, query, values or ()), screen.console, form)


@app.command()
def recheck(
    source: Annotated[str, typer.Argument(help="A .jsonl, .parquet or .csv file, or an id of datasets/sources.yaml.", metavar="SOURCE")],
    name: Annotated[str, typer.Option("--name", help="What the benchmark is called.")] = "added",
    of: Annotated[str, typer.Option("--of", help="The run whose pools are looked through.", metavar="RUN")] = LATEST,
    question: Annotated[str, typer.Option(help="Column of a file that holds the question.")] = "question",
    as_json: Json = False,
) -> None:
    """Hold the pools of an earlier run against the questions of a benchmark that was added later. Changes nothing of the run.

    Example: posttrain recheck aime.jsonl --name aime --of tiny-3
    """
    with _reported(as_json) as screen:
        from flows.recheck import described, show
        from flows.recheck import recheck as find_overlap

        found = find_overlap(home_folder(), name, described(source, question), of)
        if as_json:
            counts, hits = found.findings.counts.to_pylist(), found.findings.hits.to_pylist()
            _write({"run": found.record.id, "rows": found.rows, "compared": found.compared, "counts": counts, "hits": hits})
        else:
            show(found, screen.console)


@app.command()
def review(
    recipe: RecipeName = "tiny",
    node: Annotated[str, typer.Option("--stage", help="The cold start whose traces are reviewed.")] = "cold_start",
    set_: Set = None,
    check: Annotated[Path | None, typer.Option("--check", help="Check this edited file in place of writing one.", metavar="FILE")] = None,
    as_json: Json = False,
) -> None:
    """Write the traces that a cold start learns from to a file for people to edit; with --check, say what an edited file keeps.

    Example: posttrain review tiny; posttrain review tiny --check .posttrain/reviews/cold_start-0123456789ab.jsonl
    """
    with _reported(as_json) as screen:
        from flows.review import check_of, check_review, export_traces, use_of

        home, overrides = home_folder(), set_ or []
        if check is None:
            path, count = export_traces(recipe, overrides, node, home)
            said = f"{count} traces are in {path}\nEdit `decision`, `trace`, `response` or `note`, then check it:\n"
            said += check_of(recipe, overrides, node, path)
        else:
            path, count = check, check_review(recipe, overrides, node, home, check)
            said = f"{count} traces are kept; train on them: {use_of(recipe, overrides, node, path)}"
        if as_json:
            _write({"file": str(path), "traces": count})
        else:
            screen.console.print(said, soft_wrap=True, markup=False, highlight=False)


@app.command("tests")
def code_tests(
    problems: Annotated[Path, typer.Argument(help="A .jsonl file with one problem a row.", metavar="PROBLEMS", show_default=False)],
    out: Annotated[
        Path | None, typer.Option("--out", help="Where kept problems go; without it PROBLEMS.tests.jsonl.", metavar="FILE")
    ] = None,
    inputs: Annotated[int, typer.Option(help="Different inputs a problem, which its generators fill up to.", min=1, max=10_000)] = 50,
    min_tests: Annotated[
        int | None, typer.Option(help="Fewest tests of a kept problem; without it four fifths of --inputs, as 40 of 50.", min=1)
    ] = None,
    seed: Annotated[int, typer.Option(help="First seed that a generator reads; the others follow it.", min=0)] = 0,
    as_json: Json = False,
) -> None:
    """Make tests for code problems out of known solutions, by the rules of Kimi k1.5 (7 of 10 agree, 9 of 10 pass), in the sandbox.

    A row holds `question`; `solutions`, a list of programs known to be right; `generator`, a program (or a list) that reads a seed and
    prints one input, or `inputs`, a list of them, or both; and `function` when programs are not to read and print but to be called:
    an input is then the JSON list of arguments. Other columns are carried over. Dropped problems go to FILE.dropped.jsonl with the
    reason. Stopped, the same command continues.

    Example: posttrain tests problems.jsonl --inputs 50
    """
    with _reported(as_json, "problems") as screen:
        from flows.code_tests import as_json as plain
        from flows.code_tests import require_kept, show, write_tests
        from stages.rewards.code_tests import Rules

        rules = Rules(inputs, min_tests if min_tests is not None else max(1, inputs * 4 // 5), seed)
        report = write_tests(problems, out, rules, home_folder(), screen)
        if as_json:
            _write(plain(report))
        else:
            show(report, screen.console)
        require_kept(report)


@app.command()
def gc(
    keep: Annotated[int, typer.Option(help="Runs of each recipe whose checkpoints stay, the newest ones.", min=1)] = 3,
    unfinished_days: Annotated[float, typer.Option(help="Age at which a stage that never finished is given up.", min=0)] = 7.0,
    really: Annotated[bool, typer.Option("--really", help="Free it; without this, only say what would be freed.")] = False,
    as_json: Json = False,
) -> None:
    """Free the checkpoints that nothing needs: neither the newest runs, nor a registry alias, nor a running stage, nor a reuse.

    Results, metrics, samples and tables stay; a stage whose checkpoint was freed runs again when it is needed.

    Example: posttrain gc --keep 2 --really
    """
    with _reported(as_json) as screen:
        from flows.garbage import free, survey
        from flows.servers.serving import servers
        from flows.summary import needed

        home = home_folder()
        with servers(home, say=screen.say) as running:
            from flows.tracking import Tracker

            tracker = Tracker(running.mlflow_url, "", home)
            items = survey(home, needed=needed(home, keep), aliased=tracker.aliased(), unfinished_days=unfinished_days, now=time.time())
            freed = 0
            for item in (item for item in items if really and item.why_kept is None):
                if bytes_ := free([item]):
                    tracker.forget(item.digests)  # the same files by hard links
                    freed += bytes_
        screen.garbage(items, freed if really else None)
        if as_json:
            _write({"freed_bytes": freed, "items": [item._asdict() | {"folder": str(item.folder)} for item in items]})


# ---- running --------------------------------------------------------------------------------


def _request(
    recipe: str, set_: list[str] | None, from_: str | None, of: str | None, force: bool, accept_drift: list[str] | None
) -> Request:
    return Request(
        recipe=recipe, overrides=tuple(set_ or ()), start_from=from_, of_run=of, force=force, accept_drift=tuple(accept_drift or ())
    )


def _conduct(screen: Screen, job: Job, started: float) -> Outcome:
    """Run a job; its time counts from when the command began."""
    from flows.conduct import run as conduct

    outcome = _timed(conduct(job.request, screen), started)
    if job.is_whole and (last := read_state(home_folder(), job.whole.name).get("last")):
        remember(home_folder(), job.whole.name, last={**last, "totals": outcome.totals._asdict()})
    return outcome


def _timed(outcome: Outcome, started: float) -> Outcome:
    return outcome._replace(totals=outcome.totals._replace(wall_seconds=round(time.monotonic() - started, 1)))


def _show(screen: Screen, outcome: Outcome, *, as_json: bool) -> None:
    screen.table(outcome.table)
    screen.comparison(outcome.comparison)
    screen.totals(outcome.totals)
    screen.links(outcome.links)
    screen.console.print(f"This is run {outcome.run}. `posttrain up` opens these pages again, at the same addresses.")
    if as_json:
        _write(_outcome_json(outcome.run, outcome.table, outcome.comparison, outcome.totals, outcome.links))


def _up_to_date(screen: Screen, recipe: Recipe, steps: tuple[Step, ...], *, as_json: bool) -> None:
    """The table, where to see it, and nothing else: no server, no import of prefect or mlflow."""
    from flows.scores.ablation import AblationTable
    from flows.summary import Totals, table_of

    home = home_folder()
    remember(home, recipe.name, *steps)
    last = read_state(home, recipe.name).get("last", {})
    results = results_of(steps)
    if last.get("fingerprints") == {name: result.fingerprint for name, result in results.items()}:
        found = AblationTable.from_json(last["table"]) if last["table"] else None
    else:
        found = table_of(recipe, results)
    links = dict(last["links"]) if last.get("variant") == recipe.variant else {}
    screen.table(found)
    screen.console.print(f"\n{recipe.name} is up to date: every stage is reused from {home}")
    screen.links(links)
    if links:
        screen.console.print("`posttrain up` opens these pages again, at the same addresses.")
    if as_json:
        _write(_outcome_json(None, found, None, Totals(0.0, 0.0, 0.0, 0), links))


def _outcome_json(run: str | None, found: AblationTable | None, comparison: Comparison | None, spent: Totals, links: Any) -> dict[str, Any]:
    return {
        "run": run,
        "table": found.to_json() if found else [],
        "comparison": comparison.to_json() if comparison else None,
        "totals": spent._asdict(),
        "links": dict(links),
    }


def _as_json(step: Step) -> dict[str, Any]:
    return {
        "node": step.node.name,
        "stage": step.node.stage,
        "action": step.action,
        "why": step.why,
        "fingerprint": step.fingerprint,
        "folder": str(step.folder) if step.folder else None,
    }


def _write(content: Any) -> None:
    typer.echo(json.dumps(content, indent=2))


@contextmanager
def _reported(as_json: bool, work: str = "stages") -> Iterator[Screen]:
    """A screen; what a user can mend is shown as one red block, and every ending has its exit status. `work` is what is kept."""
    from flows.terminal import Screen

    screen = Screen(stderr=as_json)
    # also in the background of a script, where a shell has SIGINT ignored
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield screen
    except PosttrainError as error:
        screen.error(str(error))
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        screen.error(
            f"{home_folder()}: {error.strerror} ({error.filename or 'while writing'}); free some space, or choose another "
            f"home with POSTTRAIN_HOME. Finished {work} are kept; the same command continues from here"
        )
        sys.exit(1)
    except KeyboardInterrupt:
        screen.error(f"Interrupted. Finished {work} are kept; the same command continues from here.")
        sys.exit(130)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
