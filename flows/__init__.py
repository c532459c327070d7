"""Who conducts: plans a recipe, starts its stages, records them in Prefect and MLflow."""
