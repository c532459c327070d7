"""The `posttrain` command. Light until something has to run: `plan`, `--help` and a run that finds everything
finished import neither prefect, mlflow nor torch.

Exit status: 0 fine, 1 a stage or a server failed, 2 the recipe or the command is wrong, 130 Ctrl-C.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.plan import Step, home_folder, make_plan, read_state, remember, results_of
from flows.recipe import Recipe, load_recipe, recipe_names
from stages.errors import ArtifactError, ConfigError, PosttrainError, ServerError

if TYPE_CHECKING:
    from flows.ablation import AblationTable
    from flows.post_training import Outcome
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
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a setting; can be given often. Example: --set reasoning_rl.learning_rate=1e-4", metavar="KEY=VALUE"),
]
Json = Annotated[bool, typer.Option("--json", help="Write JSON to standard output, for scripts.")]


@app.command()
def run(recipe: RecipeName, set_: Set = None, as_json: Json = False) -> None:
    """Run a recipe; what is finished already is reused.

    Interrupted or failed, the same command continues. Servers for Prefect and MLflow are started for
    the time of the run unless PREFECT_API_URL and MLFLOW_TRACKING_URI name others.

    Example: posttrain run tiny --set cold_start.learning_rate=5e-4
    """
    with _reported(as_json) as screen:
        started = time.monotonic()
        checked = load_recipe(recipe, set_ or [])
        steps = make_plan(checked, home_folder())
        screen.plan(steps)
        if all(step.action == "reuse" for step in steps):
            _up_to_date(screen, checked, steps, as_json=as_json)
            return
        _show(screen, _conduct(screen, recipe, set_ or [], None, started), as_json=as_json)


@app.command()
def plan(recipe: RecipeName, set_: Set = None, as_json: Json = False) -> None:
    """Say what a run would reuse, resume and run, and why. Changes nothing.

    Example: posttrain plan tiny --set reasoning_rl.learning_rate=1e-4
    """
    with _reported(as_json) as screen:
        steps = make_plan(load_recipe(recipe, set_ or []), home_folder())
        if as_json:
            _write([_as_json(step) for step in steps])
        else:
            screen.plan(steps)


@app.command()
def stage(
    name: Annotated[str, typer.Argument(help="A stage of the recipe, by the name that `posttrain plan` shows.")],
    recipe: Annotated[str, typer.Option("--recipe", help="The recipe that says what the stage reads.")],
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Run one stage alone, from the finished outputs of the stages before it.

    Example: posttrain stage reasoning_rl --recipe tiny --set reasoning_rl.steps=60
    """
    with _reported(as_json) as screen:
        started = time.monotonic()
        steps = make_plan(load_recipe(recipe, set_ or []).upto(name), home_folder())
        missing = [step for step in steps[:-1] if step.action != "reuse"]
        if missing:
            wanted = {source.node: str(source) for source in steps[-1].node.inputs.values()}
            what = ", ".join(f"{wanted.get(step.node.name, step.node.name)} ({step.why})" for step in missing)
            raise ArtifactError(
                f"{name} needs what has not been made with these settings: {what}. "
                f"Make it with: posttrain stage {missing[0].node.name} --recipe {recipe}{_options(set_)}"
            )
        screen.plan(steps[-1:])
        if steps[-1].action == "reuse":
            screen.console.print(f"{name} is up to date: {steps[-1].folder}")
            if as_json:
                _write({"stages": [_as_json(steps[-1])]})
            return
        _show(screen, _conduct(screen, recipe, set_ or [], name, started), as_json=as_json)


@app.command()
def up() -> None:
    """Start the pages of Prefect and MLflow over this project's runs, and keep them until Ctrl-C.

    Example: posttrain up
    """
    with _reported(False) as screen:
        from flows.serving import up as keep_up

        keep_up(home_folder(), say=screen.say)


@app.command()
def check(recipe: RecipeName, set_: Set = None) -> None:
    """Check a recipe and its settings without running anything.

    Example: posttrain check my_recipe.yaml
    """
    with _reported(False) as screen:
        checked = load_recipe(recipe, set_ or [])
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
                f"make one: posttrain run {recipe}{_options(set_)}"
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
        from flows.claims import judge, render
        from flows.summary import samples_of

        numbers = _seeds(seeds)
        if not (stated := load_recipe(recipe, set_ or []).claims):
            raise ConfigError(f"the recipe {recipe} states no claims; list them under `claims`")
        samples = []
        for number in numbers:
            overrides = [*(set_ or []), f"seed={number}"]
            screen.say(f"seed {number}")
            checked = load_recipe(recipe, overrides)
            if any(step.action != "reuse" for step in make_plan(checked, home_folder())):
                _show(screen, _conduct(screen, recipe, overrides, None, time.monotonic()), as_json=False)
            samples.append(samples_of(checked, results_of(make_plan(checked, home_folder()))))
        findings = [judge(claim, samples) for claim in stated]
        render(findings, screen.console)
        if as_json:
            _write([finding._asdict() | {"claim": str(finding.claim)} for finding in findings])
        if not all(finding.holds for finding in findings):
            sys.exit(1)


def _options(set_: list[str] | None) -> str:
    return "".join(f" --set '{item}'" for item in set_ or [])


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
        from flows.serving import servers

        with servers(home_folder(), say=screen.say) as running:
            from flows.tracking import Tracker

            done = Tracker.sync(running.mlflow_url, home_folder())
        if as_json:
            _write(done._asdict())
        else:
            screen.console.print(f"{done.sent} sent, {done.left} left")


# ---- running --------------------------------------------------------------------------------


def _conduct(screen: Screen, recipe: str, overrides: list[str], only: str | None, started: float) -> Outcome:
    """Start the fork server and the servers side by side, then the flow."""
    from flows.launch import warm_up
    from flows.serving import servers
    from flows.terminal import showing

    name = load_recipe(recipe, overrides).name  # the file may be edited while the flow runs
    warm_up()
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")  # the run page has the logs, the terminal our lines
    os.environ.setdefault("PREFECT_CLIENT_MAX_RETRIES", "3")  # the waits double: 5 would mean a minute for every call to a dead server
    with servers(home_folder(), say=screen.say) as running, showing(screen):
        from flows.post_training import post_training, send_the_rest

        try:
            outcome = post_training(recipe=recipe, overrides=overrides, stage=only)
        except Exception as error:
            if not isinstance(error, PosttrainError) and (trouble := running.check("prefect")):
                atexit.register(_leave)
                raise ServerError(trouble) from error
            raise
        finally:
            if not running.check("prefect"):
                send_the_rest()
    spent = outcome.totals._replace(wall_seconds=round(time.monotonic() - started, 1))
    if only is None and (last := read_state(home_folder(), name).get("last")):
        remember(home_folder(), name, last={**last, "totals": spent._asdict()})
    return outcome._replace(totals=spent)


def _show(screen: Screen, outcome: Outcome, *, as_json: bool) -> None:
    screen.table(outcome.table)
    screen.totals(outcome.totals)
    screen.links(outcome.links)
    screen.console.print("`posttrain up` opens these pages again, at the same addresses.")
    if as_json:
        _write(_outcome_json(outcome.table, outcome.totals, outcome.links))


def _up_to_date(screen: Screen, recipe: Recipe, steps: tuple[Step, ...], *, as_json: bool) -> None:
    """The table, where to see it, and nothing else: no server, no import of prefect or mlflow."""
    from flows.ablation import AblationTable
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
        _write(_outcome_json(found, Totals(0.0, 0.0, 0.0, 0), links))


def _outcome_json(found: AblationTable | None, spent: Totals, links: Any) -> dict[str, Any]:
    return {"table": found.to_json() if found else [], "totals": spent._asdict(), "links": dict(links)}


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
def _reported(as_json: bool) -> Iterator[Screen]:
    """A screen; what a user can mend is shown as one red block, and every ending has its exit status."""
    from flows.terminal import Screen

    screen = Screen(stderr=as_json)
    # also in the background of a script, where a shell has SIGINT ignored
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield screen
    except PosttrainError as error:
        screen.error(str(error))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        screen.error("Interrupted. Finished stages are kept; the same command continues from here.")
        sys.exit(130)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave() -> None:
    """Skip what Prefect does at exit: it would try for minutes to reach a server that is gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ServerError.exit_code)
