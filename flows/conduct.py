"""Run a request from Python or the command line: servers for its time, then the flow. The forms of Prefect call the same flows.

    from flows.conduct import run, run_ablation
    from flows.request import Request

    outcome = run(Request(recipe="tiny", only="reasoning_rl", of_run="latest", overrides=("reasoning_rl.loss=dr_grpo",)))
    outcome = run_ablation(Request(recipe="tiny"), "reasoning_rl", ["loss=dapo,dr_grpo"], seeds=3)

Light: prefect and mlflow are imported when something runs.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from flows.plan import home_folder
from flows.request import Request
from stages.errors import PosttrainError, ServerError

if TYPE_CHECKING:
    from prefect import State

    from flows.post_training import Outcome
    from flows.terminal import Screen


_LAST_WAIT_S = 60.0


def run(request: Request, screen: Screen | None = None) -> Outcome:
    """Run what is asked for and wait for it. Raises PosttrainError; RunCancelled when it was cancelled on the Prefect page."""

    def call() -> Outcome | State | None:
        from flows.post_training import post_training

        return post_training(
            recipe=request.recipe,
            overrides=list(request.overrides),
            only=request.only or "",
            start_from=request.start_from or "",
            of_run=request.of_run or "",
            force=request.force,
            accept_drift=list(request.accept_drift),
        )

    return _with_servers(call, screen)


def run_ablation(
    request: Request, stage: str, vary: Sequence[str], *, seeds: int = 1, compare_at: str | None = None, screen: Screen | None = None
) -> Outcome:
    """Run the variants of a stage and compare them; `vary` holds `key=a,b`. Raises as `run` does."""

    def call() -> Outcome | State | None:
        from flows.sweep import ablation

        return ablation(
            recipe=request.recipe,
            stage=stage,
            vary=list(vary),
            seeds=seeds,
            overrides=list(request.overrides),
            of_run=request.of_run or "",
            compare_at=compare_at or "",
            force=request.force,
        )

    return _with_servers(call, screen)


def _with_servers(call: Callable[[], Outcome | State | None], screen: Screen | None) -> Outcome:
    """Start the fork server and the servers side by side, then the flow."""
    from flows.launch import warm_up
    from flows.servers.serving import servers
    from flows.terminal import Screen, showing

    on = screen or Screen()
    warm_up()
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")  # the run page has the logs, the terminal our lines
    with servers(home_folder(), say=on.say) as running, showing(on):
        from prefect.exceptions import CancelledRun

        from flows.post_training import Outcome, send_the_rest
        from flows.stage import RunCancelled
        from flows.tracking import Tracker
        from flows.tracking.outbox import Outbox

        try:
            outcome = call()
        except CancelledRun as error:
            raise RunCancelled("Cancelled. Finished stages are kept; the same command continues from here") from error
        except Exception as error:
            if not isinstance(error, PosttrainError) and (trouble := running.check("prefect")):
                atexit.register(_leave)
                raise ServerError(trouble) from error
            raise
        finally:
            if not running.check("prefect"):
                send_the_rest()
        if len(Outbox(home_folder())):  # MLflow was away at the end; ours comes back
            running.wait_for("mlflow", _LAST_WAIT_S, on.say)
            Tracker.sync(running.mlflow_url, home_folder())
        assert isinstance(outcome, Outcome)
        return outcome


def _leave() -> None:
    """Skip what Prefect does at exit: it would try for minutes to reach a server that is gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ServerError.exit_code)
