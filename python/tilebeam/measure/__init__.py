"""Measurements: throughput, perplexity, traces, and what the machine can do."""
