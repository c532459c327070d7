"""The links between runs: from a checkpoint to what it was made of, and forward to what read and scored it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flows.tracking import Tracker

CURATED = "12" * 32


def pages(store: Any) -> dict[str, str]:
    """Run name to the end of a link to its page."""
    return {
        name: f"(#/experiments/{store.experiment}/runs/{run.info.run_id}?workflowType=machine_learning)"
        for name, run in store.runs().items()
    }


def test_lineage_of_a_stage_links_to_the_makers_of_its_inputs(uri: str, tmp_path: Path, story: Any, store: Any) -> None:
    tracker = Tracker(uri, "small", tmp_path)
    recipe = story.start_recipe(tracker)
    curation = story.start(tracker, recipe, node="curation", fingerprint=CURATED, inputs={}, index=0)
    traces = story.dataset(tmp_path / "curated.parquet", name="curation.traces", producer=CURATED)
    story.finish(tracker, curation, recipe, "curation", story.result("curation", CURATED, {"traces": traces}, {}))
    base = story.checkpoint(tmp_path / "base", "base", name="base", producer="given")
    stage = story.start(tracker, recipe, node="cold_start", fingerprint=story.tuned, inputs={"model": base, "traces": traces})
    page = pages(store)
    note = store.note(stage)
    assert f"[Recipe run]{page['small:default']} · [Prefect run](http://prefect/run)" in note
    assert f"Reads [model: base]{page['base']} · [curation.traces]{page['curation:default']}" in note
    for maker in ("base", "curation:default"):
        assert f"Read by [cold_start:default]{page['cold_start:default']}" in store.note(store.runs()[maker].info.run_id)


def test_lineage_forward_names_checkpoint_evaluation_and_readers_once(uri: str, tmp_path: Path, story: Any, store: Any) -> None:
    tracker = Tracker(uri, "small", tmp_path)
    played = story.play(tracker)
    for variant in ("default", "other"):
        fingerprint = variant[0] * 64
        story.start(tracker, played.recipe, node="fusion", fingerprint=fingerprint, inputs={"model": played.tuned}, variant=variant)
    scored = story.result("evaluation", story.scored, {}, {"eval/easy_thinking": 0.5})
    story.finish(tracker, played.evaluation, played.recipe, "evaluation_cold_start", scored)  # sent a second time
    page, note = pages(store), store.note(played.stage)
    (model,) = store.client.search_logged_models([store.experiment], filter_string="tags.node = 'cold_start'")
    assert f"Checkpoint [cold_start.model](#/experiments/{store.experiment}/models/{model.model_id}?workflowType=machine_learning)" in note
    assert note.count(f"Evaluated by [evaluation_cold_start:default]{page['evaluation_cold_start:default']}") == 1
    assert f"Read by [fusion:default]{page['fusion:default']} · [fusion:other]{page['fusion:other']}" in note
    assert f"Scores [cold_start.model]{page['cold_start:default']}" in store.note(played.evaluation).replace("model: ", "")


def test_lineage_with_many_readers_keeps_the_note_short(uri: str, tmp_path: Path, story: Any, store: Any) -> None:
    tracker = Tracker(uri, "small", tmp_path)
    played = story.play(tracker)
    for number in range(15):
        variant = f"fusion.epochs={number}"
        inputs = {"model": played.tuned}
        story.start(tracker, played.recipe, node="fusion", fingerprint=f"{number}".ljust(64, "f"), inputs=inputs, variant=variant)
    (readers,) = [line for line in store.note(played.stage).splitlines() if line.startswith("Read by ")]
    assert readers.count("](#/experiments/") == 12
    assert "[fusion:epochs=14]" in readers
    assert "[fusion:epochs=0]" not in readers
