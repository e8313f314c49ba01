"""How much the tests try: everything, unless `make test` asks for the quick profile.

A wall time is never a test: hypothesis neither times examples nor minds a slow machine.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("full", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("full"), max_examples=15)
settings.load_profile("full")
