from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from civetta.ngram.hash import NgramHash, make_hash, splitmix64

EOS = 248044
REAL = make_hash(
    vocab=248320,
    size=3,
    heads_per_ngram=8,
    base=20_000_000,
    seed=1234,
    eos_token_id=EOS,
    divisor=128,
)
IDS = [248045, 846, 198, 9419, 248046, 198, 248044, 7, 248056, 248056]
GOLDEN = {
    0: "13981229 30076798 49239434 61315716 98540601 111186732 120378863 146384625 173637879"
    " 184336749 217808755 222173721 249579227 277180543 299757935 312970430",
    1: "4908448 36872991 46611251 64451521 83649409 110850044 122402102 159207155 170314019"
    " 195445770 214314282 239389039 254862662 271565595 284073139 308659387",
    6: "16849591 37537304 42290399 73883125 88405327 114186760 123740665 158125394 162126929"
    " 190169925 201084305 223990392 248114762 273201310 295110750 306260765",
    7: "2927653 34980843 54748278 66612378 97814964 109013870 126560393 151352333 167888935"
    " 182235580 215170017 237467519 247510681 278779700 296141806 304994522",
    9: "16982399 34740182 54733895 75973670 98195745 119174304 120865008 143535541 175808735"
    " 187243677 215270518 231945093 240471962 269266548 285590923 307658255",
}


def small(size: int = 3, heads: int = 2, eos: int = 5) -> NgramHash:
    return make_hash(
        vocab=40, size=size, heads_per_ngram=heads, base=50, seed=9, eos_token_id=eos, divisor=16
    )


def scalar_rows(h: NgramHash, ids: list[int], place: int) -> list[int]:
    """One position, in Python integers, from the words of model.md A.5."""
    context, broken = [ids[place]], False
    for back in range(1, h.size):
        source = ids[place - back] if place >= back else h.eos_token_id
        broken = broken or source == h.eos_token_id
        context.append(h.eos_token_id if broken else source)
    rows = []
    for order in range(2, h.size + 1):
        mixed = 0
        for token, multiplier in zip(context[:order], h.multipliers, strict=False):
            mixed ^= token * multiplier
        for head in range((order - 2) * h.heads_per_ngram, (order - 1) * h.heads_per_ngram):
            rows.append(mixed % h.vocab_sizes[head] + h.offsets[head])
    return rows


@pytest.mark.parametrize("place", GOLDEN)
def test_golden_rows(place):
    assert REAL.row_ids(IDS, ())[place].tolist() == [int(x) for x in GOLDEN[place].split()]


def test_golden_constants():
    assert REAL.multipliers == (23703573157769, 20109073645365, 8052911324071)
    offset_of_prime = (3, 23, 33, 47, 59, 63, 69, 77, 81, 93, 107, 147, 153, 159, 161, 171)
    assert REAL.vocab_sizes == tuple(20_000_000 + x for x in offset_of_prime)
    assert REAL.offsets == (
        *(0, 20000003, 40000026, 60000059, 80000106, 100000165, 120000228, 140000297),
        *(160000374, 180000455, 200000548, 220000655, 240000802, 260000955, 280001114, 300001275),
    )
    assert REAL.offsets[-1] + REAL.vocab_sizes[-1] == 320001446
    assert REAL.rows == 320001536 == 128 * 2500012
    assert (REAL.heads, REAL.context) == (16, 2)


def test_splitmix64_of_zero_is_the_published_first_output():
    assert splitmix64(0) == 0xE220A8397B1DCDAF


def test_a_second_layer_takes_the_following_primes_and_other_multipliers():
    both = make_hash(
        vocab=40, size=3, heads_per_ngram=2, base=50, seed=9, eos_token_id=5, divisor=16,
        ple_index=1,
    )  # fmt: skip
    assert small().vocab_sizes == (53, 59, 61, 67)
    assert both.vocab_sizes == (71, 73, 79, 83)
    assert not set(both.multipliers) & set(small().multipliers)


@pytest.mark.parametrize("cut", range(len(IDS) + 1))
def test_a_split_sequence_hashes_as_the_whole(cut):
    whole = REAL.row_ids(IDS, ())
    head = REAL.row_ids(IDS[:cut], ())
    for history in (IDS[:cut], IDS[:cut][-REAL.context :]):
        tail = REAL.row_ids(IDS[cut:], history)
        assert np.array_equal(np.concatenate([head, tail]), whole)


def test_no_tokens_give_no_rows():
    assert REAL.row_ids([], IDS).shape == (0, 16)


def test_the_reset_is_on_eos_alone_and_not_on_the_chat_end():
    chat_end = 248046
    free, cut = REAL.row_ids([7, chat_end, 8], ()), REAL.row_ids([9, chat_end, 8], ())
    assert (free[2, 8:] != cut[2, 8:]).all()  # the trigram sees past <|im_end|>
    free, cut = REAL.row_ids([7, EOS, 8], ()), REAL.row_ids([9, EOS, 8], ())
    assert np.array_equal(free[2], cut[2])
    assert not np.array_equal(free[1], cut[1])  # EOS itself keeps its context


@settings(max_examples=150, deadline=None)
@given(
    ids=st.lists(st.sampled_from([0, 1, 5, 5, 7, 39]), min_size=1, max_size=14),
    size=st.integers(2, 5),
    heads=st.integers(1, 3),
    cut=st.integers(0, 14),
)
def test_rows_equal_a_slow_scalar_oracle(ids, size, heads, cut):
    h = small(size, heads)
    wanted = [scalar_rows(h, ids, place) for place in range(len(ids))]
    assert h.row_ids(ids, ()).tolist() == wanted
    assert h.row_ids(ids[cut:], ids[:cut]).tolist() == wanted[cut:]
    assert max(max(row) for row in wanted) < h.rows


def test_ids_equal_those_of_transformers():
    modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

    config = Qwen4ExpTextConfig(
        vocab_size=300,
        ngram_size=3,
        heads_per_ngram=4,
        eos_token_id=17,
        ngram_vocab_size_base=500,
        make_ngram_vocab_size_divisible_by=64,
        ple_embed_dim=64,
        hidden_size=64,
        seed=77,
        split_ngram_parts=1,
    )
    theirs = modeling.Qwen4ExpTextNGramEmbedding(config, embedding_dim=64, layer_idx=1)
    ours = make_hash(
        vocab=300, size=3, heads_per_ngram=4, base=500, seed=77, eos_token_id=17, divisor=64
    )
    assert tuple(theirs.layer_multipliers.tolist()) == ours.multipliers
    assert theirs.ngram_embedding.weight.shape[0] == ours.rows
    rows = torch.arange(ours.rows, dtype=torch.float32)[:, None].expand(-1, 8)
    theirs.ngram_embedding.weight = torch.nn.Parameter(rows.clone())
    random = np.random.default_rng(3)
    ids = random.integers(0, 300, 500)
    ids[random.random(500) < 0.2] = 17
    with torch.no_grad():
        found = theirs(torch.from_numpy(ids)[None], None)[0].view(500, 8, 8)[:, :, 0]
    assert np.array_equal(found.long().numpy(), ours.row_ids(ids, ()))
