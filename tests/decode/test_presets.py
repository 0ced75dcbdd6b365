from __future__ import annotations

from dataclasses import fields, replace

import pytest

from civetta.decode.limits import RANGES, check_sampling
from civetta.decode.presets import random_seed, resolve, server_overrides
from civetta.errors import RequestInvalid
from civetta.options import SamplingOptions
from civetta.types import SamplingOverrides, SamplingParams

NOTHING = SamplingOverrides()


@pytest.mark.parametrize(
    ("thinking", "temperature", "top_p", "presence"),
    [(True, 1.0, 0.95, 0.0), (False, 0.7, 0.8, 1.5)],
)
def test_presets_by_thinking_mode(thinking, temperature, top_p, presence):
    params = resolve(NOTHING, thinking=thinking, draw_seed=lambda: 5)
    assert params == SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=20,
        presence_penalty=presence,
        min_p=0.0,
        frequency_penalty=0.0,
        repeat_penalty=1.0,
        seed=5,
    )
    check_sampling(params)


def test_request_beats_server_beats_preset_field_by_field():
    server = SamplingOverrides(temperature=0.5, top_k=7, seed=11)
    request = SamplingOverrides(temperature=0.25, min_p=0.1)
    params = resolve(request, server, thinking=True)
    assert (params.temperature, params.top_k, params.min_p) == (0.25, 7, 0.1)
    assert (params.top_p, params.seed) == (0.95, 11)


@pytest.mark.parametrize("name", [entry.name for entry in fields(SamplingOverrides)])
def test_an_explicit_zero_is_kept(name):
    server = SamplingOverrides(**{name: 1})
    assert getattr(resolve(replace(NOTHING, **{name: 0}), server, thinking=False), name) == 0
    assert getattr(resolve(NOTHING, server, thinking=False), name) == 1


def test_unseeded_requests_draw_64_bit_seeds():
    seeds = {resolve(NOTHING, thinking=True).seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert max(random_seed() for _ in range(64)) >= 2**60
    assert resolve(SamplingOverrides(seed=0), thinking=True, draw_seed=lambda: 9).seed == 0


def test_logprobs_are_the_requests_own():
    assert resolve(NOTHING, thinking=True).logprobs is None
    assert resolve(NOTHING, thinking=True, logprobs=0).logprobs == 0


def test_flags_become_overrides():
    assert server_overrides(SamplingOptions()) == NOTHING
    options = SamplingOptions(temperature=0.0, top_k=3, seed=4)
    assert server_overrides(options) == SamplingOverrides(temperature=0.0, top_k=3, seed=4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", True),
        ("temperature", "1"),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 1.01),
        ("min_p", -0.01),
        ("min_keep", 0),
        ("seed", -1),
        ("seed", 2**64),
        ("repeat_penalty", 0),
        ("repeat_last_n", -2),
        ("frequency_penalty", 2.5),
        ("presence_penalty", -2.5),
        ("logprobs", 21),
        ("logprobs", -1),
    ],
)
def test_values_out_of_range_name_themselves(name, value):
    with pytest.raises(RequestInvalid, match=name) as caught:
        check_sampling(replace(SamplingParams(), **{name: value}))
    assert caught.value.param == name


def test_bounds_are_inclusive():
    for name, limits in RANGES.items():
        check_sampling(replace(SamplingParams(), **{name: limits.low}))
        if limits.high is not None:
            check_sampling(replace(SamplingParams(), **{name: limits.high}))


def test_every_parameter_has_a_range():
    others = {"logit_bias"}  # has bounds of its own, below
    assert set(RANGES) | others == {entry.name for entry in fields(SamplingParams)}


@pytest.mark.parametrize(
    "bias", [((0, 101.0),), ((5, float("nan")),), tuple((i, 1.0) for i in range(1025))]
)
def test_biases_out_of_range_are_refused(bias):
    with pytest.raises(RequestInvalid) as caught:
        check_sampling(SamplingParams(logit_bias=bias))
    assert caught.value.param == "logit_bias"
