"""Before torch is imported: how its threads wait, and where Triton's kernels run; and Ctrl+C.

Beside other work on the same cores, spinning threads hold up the very thread that they wait for:
a decode of civetta-nano was measured 30 times slower. Commands that tests start inherit it. Without
a GPU the Triton kernels run under Triton's interpreter. A shell starts background jobs with SIGINT
ignored, and commands that tests interrupt would inherit that.
"""

import logging
import os
import signal

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import pytest
import torch

signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _fresh_logger():
    """A command that a test runs sets the package's logger up; no other test shall see that."""
    logger = logging.getLogger("civetta")
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
    logger.handlers.clear()
