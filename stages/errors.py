"""The errors a user can meet. Each message names what failed, the value, the rule and the remedy."""


class PosttrainError(Exception):
    """Something a user can mend. Its text is shown without a traceback; `exit_code` is the command's."""

    exit_code = 1


class ConfigError(PosttrainError):
    """A recipe, an override or a setting breaks a rule; nothing was started."""

    exit_code = 2


class DataError(PosttrainError):
    """Rows or files that a stage reads cannot be used."""


class ArtifactError(PosttrainError):
    """A finished stage's output is missing, was changed, or does not fit the stage that reads it."""


class RolloutError(PosttrainError):
    """The engine could not load a model, take new weights, or finish a request."""


class RewardError(PosttrainError):
    """Too many samples could not be graded, or a grader broke."""


class TrainingError(PosttrainError):
    """A trainer ended without a usable model."""


class StageError(PosttrainError):
    """A stage's process failed, was killed, or ran past its limit. The finished stages are kept."""


class ServerError(PosttrainError):
    """Prefect or MLflow could not be started or reached."""
