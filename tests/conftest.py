"""What holds for all tests: generated examples have no deadline, and in CI they are the same each time.

A deadline would be a timed test. Elsewhere than in CI examples are new with each run; a failure prints how to
replay it.
"""

import os

from hypothesis import settings

settings.register_profile("here", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")
