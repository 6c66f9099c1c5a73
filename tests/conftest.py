"""One thread a process: tests run side by side, and ranks of a test are processes of their own.

Set before anything imports torch or numpy.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

from hypothesis import settings

# Machines that run tests are shared: an example that is slow for once is no failure.
settings.register_profile("drydock", deadline=None)
settings.load_profile("drydock")
