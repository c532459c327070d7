"""The Prefect server, the MLflow server and the process that serves deployments: started, kept alive, reconciled, stopped."""
