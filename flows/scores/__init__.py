"""What the samples of evaluations say: the ablation table, variants compared, claims judged, answers side by side."""
