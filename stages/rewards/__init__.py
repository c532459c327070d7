"""Text in, verdict and reason out. A grade is right, wrong or not graded; never a silent zero."""
