"""Searches: Best-of-N, votes, beams, adaptive budgets."""
