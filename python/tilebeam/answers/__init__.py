"""Answers out of texts, and when two of them are equal."""
