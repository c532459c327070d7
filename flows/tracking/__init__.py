"""The one door to MLflow: what a recipe, its stages and their evaluations leave there, and the links to it.

One experiment a recipe. Stage runs are flat, so that a filter finds them; an evaluation is nested in
the run whose model it scores; checkpoints are LoggedModels, ours hard-linked in place; data sets are inputs
with our own digests. A call that MLflow cannot take is kept on disk and sent later: tracking never
fails a stage.
"""

from __future__ import annotations

from flows.tracking.forwarder import Forwarder
from flows.tracking.samples import VariantSamples
from flows.tracking.tracker import Kind, Status, Sync, Tracker

__all__ = ["Forwarder", "Kind", "Status", "Sync", "Tracker", "VariantSamples"]
