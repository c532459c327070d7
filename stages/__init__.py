"""What is done: plain Python, one file a stage, each runnable alone. Knows neither Prefect nor MLflow."""
