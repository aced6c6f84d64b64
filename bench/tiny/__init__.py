"""A world small enough to train: a task, models, a reward model. README.md says what is what."""
