"""The draft head across images: it reads their rows, not the placeholders' embeddings."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from mtp_reference import HeadReference
from test_mtp import OPS, TINY, drafted, load, relative

import tiny as writers
from civetta.model.inputs import ImageRows, Piece
from civetta.model.rope import rope_positions
from civetta.state.spans import ImageSpan

PAD, TOKENS = 7, 120
SPANS = (
    ImageSpan(start=9, rows=3, cols=4, digest=b"a"),
    ImageSpan(start=40, rows=5, cols=8, digest=b"b"),
    ImageSpan(start=95, rows=1, cols=2, digest=b"c"),
)
RANDOM = np.random.default_rng(6)
IDS = [int(i) for i in RANDOM.integers(0, 256, TOKENS + 8)]
for span in SPANS:
    IDS[span.start : span.stop] = [PAD] * span.tokens
HIDDEN = TINY.text["hidden_size"]
IMAGES = [
    ImageRows(
        start=span.start,
        rows_ND=torch.from_numpy(RANDOM.normal(0, 1, (span.tokens, HIDDEN)).astype(np.float32)),
    )
    for span in SPANS
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("mtp") / "hf"
    return writers.write_hf(path, TINY.config, writers.stored(TINY.tensors))


@pytest.fixture(scope="module", params=OPS)
def trunk(request, folder):
    return load(folder, OPS[request.param])


def opened(trunk, cuts=(), tokens=TOKENS):
    """A session after `tokens` tokens in launches that end at `cuts`."""
    session = trunk.store(sessions=1, context_tokens=TOKENS + 16).open()
    session.attach(SPANS)
    for a, b in itertools.pairwise([0, *[cut for cut in cuts if cut < tokens], tokens]):
        trunk.forward_pieces([Piece(session=session, ids=IDS[a:b], rows="none", images=IMAGES)])
    return session


def streams_of(trunk):
    """X [T, S, D] of the prompt, read off the trunk."""
    seen = []
    real, trunk.head.follow = trunk.head.follow, lambda spans, x, inputs: seen.append(x)
    try:
        opened(trunk)
    finally:
        trunk.head.follow = real
    return seen[0].double().numpy()


def test_logits_equal_the_transcription(trunk):
    chain = [5, 250, 17]
    places = rope_positions(SPANS, 0, TOKENS + len(chain)).numpy().T
    reference = HeadReference(TINY.tensors, TINY.text, places=places)
    inputs = list(IDS)
    for image in IMAGES:
        inputs[image.start : image.start + len(image.rows_ND)] = list(image.rows_ND.numpy())
    x_TSD = streams_of(trunk)
    for p in range(TOKENS):
        logits, y = reference.step(inputs[p + 1], x_TSD[p])
    rows = [logits]
    for token_id in chain:
        logits, y = reference.step(token_id, y)
        rows.append(logits)
    found = drafted(trunk, opened(trunk), IDS[TOKENS], chain).double().numpy()
    assert relative(found, np.stack(rows)).max() <= 1e-4


@pytest.mark.parametrize("chunk", [1, 3, 8, 33, 64])
def test_chunks_do_not_matter(trunk, chunk):
    wanted = drafted(trunk, opened(trunk), 3, [4, 5])
    session = opened(trunk, range(chunk, TOKENS, chunk))
    assert torch.equal(drafted(trunk, session, 3, [4, 5]), wanted)


@pytest.mark.parametrize("tokens", [SPANS[0].stop, SPANS[1].stop + 1, SPANS[2].stop])
@pytest.mark.parametrize("accepted", [0, 2, 7])
def test_a_round_behind_an_image_leaves_no_trace(trunk, tokens, accepted):
    """The first rows behind an image are drafted, verified and taken back."""
    stop = min((span.start for span in SPANS if span.start >= tokens), default=TOKENS)
    accepted = min(accepted, stop - tokens - 1)
    truth = IDS[tokens : tokens + 1 + accepted]
    wrong = [(i + 1) % 256 for i in IDS[tokens + 1 + accepted : tokens + 8]]
    session = opened(trunk, tokens=tokens)
    drafted(trunk, session, truth[0], [*truth[1:], *wrong][:6])
    trunk.forward(session, [*truth, *wrong], "all")
    session.rewind(len(wrong))
    session.check()
    clean = opened(trunk, tokens=tokens + 1 + accepted)
    assert torch.equal(drafted(trunk, session, 77, [78]), drafted(trunk, clean, 77, [78]))


def test_a_snapshot_between_and_inside_images_goes_on_alike(trunk):
    wanted = drafted(trunk, opened(trunk), 3, [4, 5])
    for tokens in (SPANS[0].start, SPANS[1].start + 13, SPANS[1].stop, SPANS[2].start + 1):
        store = trunk.store(sessions=2, context_tokens=TOKENS + 16)
        first, second = store.open(), store.open()
        first.attach(SPANS)
        piece = Piece(session=first, ids=IDS[:tokens], rows="none", images=IMAGES)
        trunk.forward_pieces([piece])
        second.attach(SPANS)
        second.restore(first.snapshot())
        piece = Piece(session=second, ids=IDS[tokens:TOKENS], rows="none", images=IMAGES)
        trunk.forward_pieces([piece])
        assert torch.equal(drafted(trunk, second, 3, [4, 5]), wanted)
