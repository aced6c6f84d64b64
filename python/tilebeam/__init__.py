"""Tilebeam: test-time scaling on local hardware."""
