"""What can be started from the Prefect page: the recipe, each stage alone, an ablation, a review of traces.

Served by `posttrain up` in a process of its own. No pool and no worker to set up: that process asks the server
every two seconds and starts each run in a process of its own, which ends when it does.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterTags
from prefect.deployments.runner import RunnerDeployment
from prefect.runner import Runner
from prefect.types.entrypoint import EntrypointType

from flows import forms
from flows.post_training import post_training
from flows.review_flow import review_traces
from flows.servers.serving import READY_FILE
from flows.sweep import ablation
from stages.config import STAGES

_AT_ONCE = 4
_TAG = "posttrain"


def deployments() -> list[RunnerDeployment]:
    """The recipe, an ablation, every stage in the order of the recipe, and the review of traces."""
    stages = {f"stage {kind}": getattr(forms, kind) for kind in STAGES}
    named = {"recipe": post_training, "recipe ablation": ablation, **stages, "review of traces": review_traces}
    return [each.to_deployment(name, tags=[_TAG], entrypoint_type=EntrypointType.MODULE_PATH) for name, each in named.items()]


async def serve(made: list[RunnerDeployment]) -> None:
    """Serve them until this process is ended."""
    runner = Runner(name="posttrain", limit=_AT_ONCE, pause_on_shutdown=False)
    served = {await runner.aadd_deployment(deployment) for deployment in made}
    async with get_client() as client:
        for known in await client.read_deployments(deployment_filter=DeploymentFilter(tags=DeploymentFilterTags(all_=[_TAG]))):
            if known.id not in served:  # of another version
                await client.delete_deployment(known.id)
    if ready := os.environ.get(READY_FILE):
        Path(ready).touch()
    await runner.start()


if __name__ == "__main__":
    asyncio.run(serve(deployments()))
