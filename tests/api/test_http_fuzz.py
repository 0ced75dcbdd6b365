"""Requests made from /openapi.json; benchmarks/api_fuzz.py makes thousands on a real server."""

from __future__ import annotations

import pytest

schemathesis = pytest.importorskip("schemathesis")

from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from api.serving import app_of, request  # noqa: E402
from civetta.api.routes import ENDPOINTS  # noqa: E402
from fake_engine import FakeEngine  # noqa: E402

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
APP = app_of(FakeEngine("ok"))
SCHEMA = schemathesis.openapi.from_dict(request(APP, "GET", "/openapi.json").json())
SCHEMA.app = APP
POSITIVE, NEGATIVE = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
OPERATIONS = [
    (endpoint.method, endpoint.paths[0].replace(":path}", "}"), mode)
    for endpoint in ENDPOINTS
    for mode in ((POSITIVE, NEGATIVE) if endpoint.body else (POSITIVE,))
]


@pytest.mark.parametrize(("method", "path", "mode"), OPERATIONS)
def test_any_request_gets_an_answer_that_the_document_names(method, path, mode):
    strategy = SCHEMA[path][method].as_strategy(generation_mode=mode)

    @seed(7)
    @settings(
        max_examples=8,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def check(case):
        case.call_and_validate(checks=CHECKS)

    check()
