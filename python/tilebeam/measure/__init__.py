"""Measurements: throughput, perplexity, traces, second moments, and what the machine can do."""
