from __future__ import annotations

import dataclasses
import re

from api.serving import app_of, request
from civetta.api.metrics import METRICS
from civetta.cache.protocol import MissReason
from civetta.engine.histogram import FIRST_TOKEN_S, Histogram
from civetta.engine.protocol import DurationStats
from fake_engine import FakeEngine

SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(\{[a-z_]+="[^"]*"\})? (-?[0-9.e+-]+)')


def scrape(app):
    """Values by name and labels; proves the text's grammar on the way."""
    response = request(app, "GET", "/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    values, kinds, helped = {}, {}, set()
    for line in response.text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name in helped, "HELP stands before TYPE"
            assert name not in kinds, "a family is told once"
            kinds[name] = kind
        elif line.startswith("# HELP "):
            helped.add(line.split(" ")[2])
        else:
            match = SAMPLE.fullmatch(line)
            assert match, line
            family = re.sub(r"_(bucket|sum|count)$", "", match[1])
            assert match[1] in kinds or kinds.get(family) == "histogram", line
            assert match[1] + (match[2] or "") not in values
            values[match[1] + (match[2] or "")] = float(match[3])
    return values


def with_stats(**values):
    engine = FakeEngine()
    plain = engine.stats
    engine.stats = lambda: dataclasses.replace(plain(), **values)
    return app_of(engine)


def test_metrics_follow_the_work():
    app = app_of(FakeEngine("abc"))
    request(app, "POST", "/v1/completions", body={"prompt": "Hi"})
    values = scrape(app)
    assert values["llamacpp:prompt_tokens_total"] == 2
    assert values["llamacpp:tokens_predicted_total"] == 3
    assert values['civetta:http_responses_total{status="200"}'] == 1
    assert values["civetta:http_requests_open"] == 1, "the scrape itself"


def test_case_71_a_scrape_changes_nothing_and_has_the_names_of_dashboards():
    app = app_of(FakeEngine("abc"))
    request(app, "POST", "/v1/completions", body={"prompt": "Hi"})
    first, second = scrape(app), scrape(app)
    own = {name for name in first if name.startswith(("civetta:http", "process_"))}
    assert {n: v for n, v in first.items() if n not in own} == {
        n: v for n, v in second.items() if n not in own
    }
    assert first.keys() >= {
        "llamacpp:prompt_tokens_total",
        "llamacpp:prompt_seconds_total",
        "llamacpp:tokens_predicted_total",
        "llamacpp:tokens_predicted_seconds_total",
        "llamacpp:n_decode_total",
        "llamacpp:n_busy_slots_per_decode",
        "llamacpp:prompt_tokens_seconds",
        "llamacpp:predicted_tokens_seconds",
        "llamacpp:requests_processing",
        "llamacpp:requests_deferred",
        "llamacpp:n_tokens_max",
        "llamacpp:kv_cache_usage_ratio",
    }
    assert scrape(app_of(None)).keys() >= {"llamacpp:requests_processing"}, "while loading too"


def test_histograms_are_cumulative_and_whole():
    histogram = Histogram(FIRST_TOKEN_S)
    for seconds in (0.005, 0.01, 0.02, 400.0):
        histogram.add(seconds)
    values = scrape(with_stats(durations=DurationStats(first_token=histogram.stats())))
    name = "vllm:time_to_first_token_seconds"
    assert values[f'{name}_bucket{{le="0.01"}}'] == 2, "a bound belongs to its range"
    assert values[f'{name}_bucket{{le="0.025"}}'] == 3
    assert values[f'{name}_bucket{{le="300.0"}}'] == 3
    assert values[f'{name}_bucket{{le="+Inf"}}'] == values[f"{name}_count"] == 4
    assert values[f"{name}_sum"] == 400.035


def test_acceptance_by_depth_and_misses_by_reason():
    misses = tuple((reason.value, place) for place, reason in enumerate(MissReason))
    values = scrape(with_stats(draft_depths=((10, 7), (6, 2)), cache_misses=misses))
    drafted = "vllm:spec_decode_num_draft_tokens_per_pos_total"
    stood = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert (values[f'{drafted}{{position="0"}}'], values[f'{stood}{{position="0"}}']) == (10, 7)
    assert (values[f'{drafted}{{position="1"}}'], values[f'{stood}{{position="1"}}']) == (6, 2)
    assert values['civetta:cache_miss_reasons_total{reason="diverged"}'] == 1


def test_labels_are_few_whatever_is_asked():
    app = app_of(FakeEngine("a"))
    before = len(scrape(app))
    for index in range(50):
        request(app, "GET", f"/nowhere/{index}", headers={"user-agent": f"agent {index}"})
        request(app, "POST", "/v1/completions", body={"prompt": f"p{index}", "user": str(index)})
    assert len(scrape(app)) <= before + 2, "one sample a status"


def test_names_are_unique_and_counters_end_in_total():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert all(m.name.endswith("_total") == (m.kind == "counter") for m in METRICS)
