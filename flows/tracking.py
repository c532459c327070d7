"""The one door to MLflow: what a recipe, its stages and their evaluations leave there, and the links to it.

One experiment a recipe. Stage runs are flat, so that a filter finds them; evaluation runs are nested in
the stage run whose model they score; checkpoints are LoggedModels hard-linked in place; data sets are
inputs with our own digests. A call that MLflow cannot take is kept on disk and sent later: tracking
never fails a stage.
"""

from __future__ import annotations

from mlflow.utils.name_utils import _generate_random_name  # noqa: F401


