"""What a reply tells of its drafts: in all and by depth, over HTTP and for several choices together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from api.serving import app_of, drafting_always, request
from civetta.api.choices import together
from civetta.engine.load import load_engine
from civetta.model.tiny import write_tiny
from civetta.options import DraftingOptions, ModelOptions, Settings
from civetta.types import Usage

pytestmark = pytest.mark.timeout(120)
USER = {"role": "user", "content": "Say it."}


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    """An engine that drafts in every round."""
    settings = Settings(
        model=ModelOptions(model=str(write_tiny(tmp_path_factory.mktemp("tiny"))), threads=1),
        drafting=DraftingOptions(speculative="mtp", draft_tokens=3),
    )
    with pytest.MonkeyPatch.context() as patch:
        drafting_always(patch)
        with load_engine(settings) as engine:
            yield app_of(engine)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/completion", {"prompt": "Say it.", "n_predict": 24}),
        ("/v1/completions", {"prompt": "Say it.", "max_tokens": 24}),
        ("/v1/completions", {"prompt": "Say it.", "max_tokens": 24, "n": 3}),
        ("/v1/chat/completions", {"messages": [USER], "max_tokens": 24, "n": 2}),
    ],
)
def test_timings_tell_drafts_by_depth(app, path, asked):
    body = {**asked, "temperature": 0.9, "seed": 4}
    response = request(app, "POST", path, body=body)
    assert response.status_code == 200, response.text
    told, usage = response.json()["timings"], response.json().get("usage")
    if usage is not None:
        assert usage["draft_tokens"] == told["draft_n"]
        assert usage["draft_tokens_accepted"] == told["draft_n_accepted"]
    drafted, accepted = told["draft_n_by_depth"], told["draft_n_accepted_by_depth"]
    assert len(drafted) == len(accepted)
    assert sum(drafted) == told["draft_n"] > 0
    assert sum(accepted) == told["draft_n_accepted"]
    assert sum(n > 0 for n in drafted) <= 3
    assert all(one >= stood for one, stood in zip(drafted, accepted, strict=True))
    assert drafted == sorted(drafted, reverse=True)


def test_depths_of_several_choices_are_added_up():
    """Also where one of them drafted deeper than another, or not at all."""
    plain = Usage(prompt_tokens=9, completion_tokens=8)
    usages = [
        replace(
            plain, draft_tokens=7, draft_tokens_accepted=4, draft_depths=((4, 3), (2, 1), (1, 0))
        ),
        plain,
        replace(plain, draft_tokens=3, draft_tokens_accepted=3, draft_depths=((2, 2), (1, 1))),
    ]
    found = together(usages, per_prompt=3)
    assert (found.draft_tokens, found.draft_tokens_accepted) == (10, 7)
    assert found.draft_depths == ((6, 5), (3, 2), (1, 0))
