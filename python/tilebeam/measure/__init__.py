"""Measurements: throughput, perplexity, traces, importance, and what the machine can do."""
