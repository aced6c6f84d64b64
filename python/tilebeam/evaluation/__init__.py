"""Evaluation: tasks, resumable runs, statistics, plots. What `tilebeam eval` does; docs/evaluation.md teaches it."""
