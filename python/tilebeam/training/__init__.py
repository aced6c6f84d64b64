"""tilebeam reward train: a reward head on a model's own hidden states, from its own samples and a task's checker."""
