"""Profiles of Hypothesis: `HYPOTHESIS_PROFILE` is `fast`, `default` or `ci`."""

import os

from hypothesis import HealthCheck, settings


# A step runs real tensor operations twice, on machines that may be busy: no deadlines.
COMMON = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)

settings.register_profile("fast", parent=COMMON, max_examples=25)
settings.register_profile("default", parent=COMMON, max_examples=200)
settings.register_profile("ci", parent=COMMON, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
