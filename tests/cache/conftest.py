from __future__ import annotations

import pytest

from civetta.model.build import load_trunk
from civetta.model.tiny import write_tiny


@pytest.fixture(scope="session")
def tiny_trunk(tmp_path_factory):
    return load_trunk(write_tiny(tmp_path_factory.mktemp("tiny")))
