"""Before torch is imported: its threads sleep instead of spinning while they wait for each other.

Beside other work on the same cores, spinning threads hold up the very thread that they wait for:
a decode of civetta-nano was measured 30 times slower. Commands that tests start inherit it.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
