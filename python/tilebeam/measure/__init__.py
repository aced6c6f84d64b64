"""Measurements: throughput, traces, and what the machine can do."""
