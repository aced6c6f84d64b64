"""Scorers and reward models: which candidate is better."""
