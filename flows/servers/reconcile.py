"""Runs in Prefect that do not say what is true: their process is gone, or was ended on purpose.

A flow run carries its owner, a process, in its labels. Import this after `flows.servers.serving` has set the
environment: it imports prefect.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.responses import SetStateStatus
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Crashed

from flows.owner import is_gone, process_identity
from flows.servers.processes import Say

OWNER = "posttrain.owner"
_ATTEMPT = "posttrain.attempt"
_LIVE = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING, StateType.PAUSED]
_PAGE = 200


def own(flow_run_id: UUID | str) -> None:
    """Name this process as the owner of a flow run that it executes. Call it when the run, or a sub-flow run, has begun."""
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(UUID(str(flow_run_id)))
        client.update_flow_run_labels(run.id, {OWNER: process_identity(), _ATTEMPT: run.run_count})


def owner_of(run: FlowRun) -> str:
    """`host:pid:start` of the process that executes a run; empty when none has said so since the run was last started."""
    begun = run.state is not None and run.state.type != StateType.PENDING
    return str(run.labels.get(OWNER, "")) if begun and run.labels.get(_ATTEMPT) == run.run_count else ""


def close_dead_runs(say: Say, alone: bool, *, unserved: bool = False) -> None:
    """Close runs whose process is gone: Crashed, so that Retry works, or Cancelled when they were being cancelled.

    A run whose owner lives, or is on another machine, is left alone. One without an owner is dead only
    when this process is `alone` (no other one can be executing runs of this server), or when it is a
    deployment's and nothing serves deployments (`unserved`). A run that has finished keeps its state.
    """
    gone = "its process was gone when posttrain looked"
    with away_is_said(say), get_client(sync_client=True) as client:
        for run in list(_live(client)):
            owner = owner_of(run)
            if not (is_gone(owner) if owner else alone or (unserved and run.deployment_id)):
                continue
            asked_for = run.state is not None and run.state.type == StateType.CANCELLING
            remedy = "press Retry, or run the recipe again: finished stages are kept"
            state: State[None] = Cancelled(message=gone) if asked_for else Crashed(message=f"{gone}; {remedy}")
            if _set(client, run.id, state, unless=lambda now: now.type not in _LIVE):
                say(f"closed a run that had died: {run.name}")


def mark_cancelled(flow_run_ids: Iterable[UUID | str], message: str) -> None:
    """Set runs that were ended on purpose to Cancelled, whatever Prefect made of the interrupt; a completed one stays so."""
    with get_client(sync_client=True) as client:
        for flow_run_id in flow_run_ids:
            _set(
                client,
                UUID(str(flow_run_id)),
                Cancelled(message=message),
                unless=lambda now: now.type in {StateType.COMPLETED, StateType.CANCELLED},
                force=True,
            )


def runs_of(owners: Container[str], *, unowned: bool) -> list[UUID]:
    """The live flow runs that these processes execute; with `unowned`, also runs of deployments that have no owner yet."""
    with get_client(sync_client=True) as client:
        return [
            run.id for run in _live(client) if (owner_of(run) in owners if owner_of(run) else unowned and run.deployment_id is not None)
        ]


def _live(client: SyncPrefectClient) -> Iterator[FlowRun]:
    """The runs that claim to have a process; a suspended one has none on purpose."""
    live = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_LIVE)))
    offset = 0
    while page := client.read_flow_runs(flow_run_filter=live, sort=FlowRunSort.EXPECTED_START_TIME_ASC, limit=_PAGE, offset=offset):
        yield from (run for run in page if run.state is not None and run.state.name != "Suspended")
        offset += len(page)


def _set(client: SyncPrefectClient, run: UUID, state: State[None], *, unless: Callable[[State], bool], force: bool = False) -> bool:
    """Set a run's state after a last look at it; whether it is set now. Prefect may refuse, and the run may be deleted."""
    try:
        now = client.read_flow_run(run).state
        if now is not None and unless(now):
            return False
        return client.set_flow_run_state(run, state, force=force).status == SetStateStatus.ACCEPT
    except ObjectNotFound:
        return False


@contextmanager
def away_is_said(say: Say) -> Iterator[None]:
    """Prefect away or unwilling ends the block with a word in place of an error: what it claims is mended at the next start."""
    try:
        yield
    except (httpx.HTTPError, ValueError) as error:  # ValueError: it is no Prefect, or speaks of what this one does not know
        say(f"Prefect could not be asked for runs to close ({type(error).__name__}: {error}); the next start closes them")
