"""What every test starts from: one thread per process, no configuration file of the developer's, and hypothesis."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile

from hypothesis import HealthCheck, settings

# Before torch is imported, here and in every process that a test starts: several ranks share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HYPER_PARALLEL_TEST_DEVICE_TYPE", "cpu")
os.environ["HPDCP_CONFIG"] = ""
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As a shell has it for what it starts in the background; tests interrupt themselves and their children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
# What the command line prints is not to depend on the terminal, nor on how long the names of temporary folders are.
os.environ["COLUMNS"] = "200"
if "RANK" in os.environ:
    # Each rank is a pytest of its own, and they would all clear up the same old folders at the same moment.
    os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.mkdtemp(prefix="hpdcp-rank-")
    atexit.register(shutil.rmtree, os.environ["PYTEST_DEBUG_TEMPROOT"], ignore_errors=True)

pytest_plugins = ["tests.support.command", "tests.support.rank_items", "tests.support.s3"]

settings.register_profile(
    "hpdcp",
    deadline=None,
    max_examples=60,
    # A run that decides about a change must not depend on luck; at a desk, every run should look somewhere else.
    derandomize=bool(os.environ.get("CI")),
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("hpdcp")
