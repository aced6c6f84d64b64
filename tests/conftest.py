"""Settings of all tests: hypothesis does not judge how fast a machine is, which other programs may keep busy."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("tilebeam", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tilebeam")
