from __future__ import annotations

import logging

import pytest

from civetta.model.build import load_trunk
from civetta.model.tiny import write_tiny


@pytest.fixture(scope="session")
def tiny_trunk(tmp_path_factory):
    return load_trunk(write_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def cache_log(caplog):
    """What the cache logs; another test may have cut the logger off from pytest's handler."""
    logger = logging.getLogger("civetta")
    before = logger.propagate
    logger.propagate = True
    yield caplog
    logger.propagate = before
