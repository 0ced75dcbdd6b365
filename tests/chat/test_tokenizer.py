from __future__ import annotations

import json
import sys
import threading
import unicodedata

import gguf
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AddedToken
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer
from vocabularies import (
    CONTROL,
    PADDING,
    SHOWN,
    added_entries,
    gguf_metadata,
    tokenizer_json,
    trained,
    write_folder,
)

from civetta.chat.tokenizer import MAX_PIECE_CHARS, IncrementalDecoder, Tokenizer
from civetta.chat.vocabulary import byte_alphabet
from civetta.checkpoint.gguf import read_gguf_header
from civetta.errors import RequestInvalid, TokenizerError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Tokenizer.from_folder(write_folder(tmp_path_factory.mktemp("hf")))


@pytest.fixture(scope="module")
def packed():
    return Tokenizer.from_gguf(gguf_metadata())


@pytest.fixture(scope="module")
def oracle():
    vocab, merges = trained()
    theirs = Qwen3_5Tokenizer(vocab=dict(vocab) | {"<|endoftext|>": len(vocab)}, merges=merges)
    for entry in added_entries():
        token = AddedToken(entry["content"], normalized=False, special=entry["special"])
        theirs.add_tokens([token], special_tokens=entry["special"])
    assert theirs.convert_tokens_to_ids("</tool_response>") == added_entries()[-1]["id"]
    return theirs


HARD = [
    "a", "Z", "é", "e\u0301", "\u0301", "i\u0307\u0323", "ﬁ", "Å", "한",
    "\u1112\u1161\u11ab", "日本", "の", "हि", "\u094d", "שָׁ", "🙂", "👩‍👩‍👧",
    "🇩🇪", "\u200d", "\ufe0f", "0", "12345", "٣", "½", "²", " ", "  ", "   \n",
    "\n", "\r\n", "\t", "\u00a0", "\u3000", "\u2028", "'s", "'LL", "'ſ", "’t",
    ".", "...\n\n", "_", "<|", "|>", "\x00", "\ufeff", "\ufffd", "\U0010ffff",
    "def f(x):\n    ", "<think>", "<|im_end|>", "<|im_end", "</tool_call>",
    "<tool_call>\n",
]  # fmt: skip
TEXT = st.one_of(
    st.lists(st.sampled_from(HARD), max_size=12).map("".join),
    st.text(st.characters(exclude_categories=("Cs",)), max_size=30),
    st.text(st.characters(categories=("Mn", "Mc", "Lo", "Nd", "Zs", "So")), max_size=20),
)


@settings(max_examples=2000)
@given(text=TEXT)
@example(text="")
@example(text="A \u0338<think\u0338>")
@example(text=" " * 300 + "x" + "\n" * 300 + "9" * 300)
def test_both_loaders_encode_as_transformers_does(folder, packed, oracle, text):
    expected = oracle.encode(text, add_special_tokens=False)
    assert folder.encode(text) == expected
    assert packed.encode(text) == expected


@given(text=TEXT)
def test_decode_gives_the_normalised_text_back(packed, oracle, text):
    ids = packed.encode(text)
    # added tokens are cut out before normalisation, so it is piece by piece as in the encoder
    assert packed.decode(ids) == oracle.decode(ids, clean_up_tokenization_spaces=False)
    plain = packed.encode(text, parse_special=False)
    assert packed.decode(plain) == unicodedata.normalize("NFC", text)


@given(text=TEXT)
def test_unparsed_specials_are_plain_text(packed, text):
    first_added = packed.special_id("<|endoftext|>")
    assert all(token < first_added for token in packed.encode(text, parse_special=False))


@settings(max_examples=500)
@given(ids=st.lists(st.integers(0, 700), max_size=30), skip=st.booleans())
def test_decoding_any_ids_as_transformers_does(packed, oracle, ids, skip):
    theirs = oracle.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert packed.decode(ids, skip_special=skip) == theirs


@settings(max_examples=500)
@given(ids=st.lists(st.integers(0, 640), max_size=40), skip=st.booleans())
def test_stream_equals_buffer(packed, ids, skip):
    decoder = IncrementalDecoder(packed, skip_special=skip)
    texts = [decoder.push(token) for token in ids]
    assert "".join(texts) + decoder.flush() == packed.decode(ids, skip_special=skip)


@settings(max_examples=500)
@given(text=TEXT)
def test_stream_of_valid_text_has_no_partial_characters(packed, text):
    text = unicodedata.normalize("NFC", text.replace("\ufffd", ""))
    decoder = IncrementalDecoder(packed)
    streamed = [decoder.push(token) for token in packed.encode(text, parse_special=False)]
    assert decoder.flush() == ""
    assert "\ufffd" not in "".join(streamed)
    assert "".join(streamed) == text


def test_characters_split_over_tokens_wait_until_complete(packed):
    single = {value: token for token, value in ((i, packed.token_bytes(i)) for i in range(256))}
    decoder = IncrementalDecoder(packed)
    smile = "🙂".encode()
    assert [decoder.push(single[bytes([b])]) for b in smile] == ["", "", "", "🙂"]
    assert decoder.push(single[smile[:1]]) == ""
    assert decoder.push(single[smile[1:2]]) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""
    assert decoder.push(single[b"a"]) == "a"
    assert decoder.push(single[b"\xff"]) == "\ufffd"


def test_control_tokens_hide_but_reply_markers_stay(packed):
    ids = [
        packed.special_id(text)
        for text in ("<|im_start|>", "<think>", "</tool_call>", "<|im_end|>")
    ]
    assert packed.decode(ids, skip_special=True) == "<think></tool_call>"
    assert packed.decode(ids) == "<|im_start|><think></tool_call><|im_end|>"
    metadata = gguf_metadata()
    types = [3 if kind == 4 else kind for kind in metadata["tokenizer.ggml.token_type"]]
    flagged = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.token_type": types})
    assert flagged.decode(ids, skip_special=True) == "<think></tool_call>"
    decoder = IncrementalDecoder(flagged)
    assert "".join(map(decoder.push, ids)) == "<think></tool_call>"
    decoder = IncrementalDecoder(flagged, skip_special=False)
    assert decoder.push(ids[0]) == "<|im_start|>"


def test_literal_starts_stay_text(packed):
    text = "<|im_start|>user\n<|im_end|><think><|im_end|>"
    literal = {text.index("<|im_end|>"), text.index("<think>")}
    end, start = packed.special_id("<|im_end|>"), packed.special_id("<|im_start|>")
    ids = packed.encode(text, literal_starts=literal)
    assert ids[0] == start
    assert ids[-1] == end
    assert end not in ids[1:-1]
    assert packed.special_id("<think>") not in ids
    assert packed.decode(ids) == text


def test_ids_and_names_are_those_of_the_file(folder, packed):
    vocab, _ = trained()
    for tokenizer, padded in ((folder, 0), (packed, PADDING)):
        assert tokenizer.vocab_size == len(vocab) + len(CONTROL) + len(SHOWN) + padded
        assert tokenizer.specials == {e["content"]: e["id"] for e in added_entries()}
        assert tokenizer.eos_id == tokenizer.special_id("<|im_end|>")
        assert tokenizer.eog_ids == {tokenizer.eos_id, tokenizer.special_id("<|endoftext|>")}
        assert tokenizer.control_ids == {tokenizer.special_id(text) for text in CONTROL}
        assert tokenizer.named_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
        for text, token in vocab.items():
            spelled = bytes(byte_alphabet()[char] for char in text)
            assert tokenizer.token_bytes(token) == spelled


def test_ids_without_text_are_empty(packed):
    assert packed.token_bytes(packed.vocab_size - 1) == b""
    assert packed.token_bytes(packed.vocab_size + 100) == b""
    with pytest.raises(TokenizerError, match="-1"):
        packed.token_bytes(-1)
    with pytest.raises(TokenizerError, match="no_such"):
        packed.special_id("<|no_such|>")


def test_every_token_joins_to_its_bytes(packed):
    text = "Größe 日本語 🙂 <|im_end|>"
    ids = packed.encode(text)
    assert b"".join(map(packed.token_bytes, ids)) == text.encode()


def test_byte_alphabet_is_the_one_of_the_library():
    from tokenizers.pre_tokenizers import ByteLevel

    assert set(byte_alphabet()) == set(ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))


def test_a_real_gguf_file_gives_the_same_tokenizer(tmp_path, packed):
    path = tmp_path / "vocabulary.gguf"
    writer = gguf.GGUFWriter(path, "qwen4exp")
    metadata = gguf_metadata()
    writer.add_tokenizer_model(metadata["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(metadata["tokenizer.ggml.pre"])
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.add_eos_token_id(metadata["tokenizer.ggml.eos_token_id"])
    writer.add_tensor("x", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    loaded = Tokenizer.from_gguf(read_gguf_header(path).metadata)
    text = "Größe <|im_start|> 日本語 doesn't 123"
    assert loaded.encode(text) == packed.encode(text)
    assert loaded.eog_ids == packed.eog_ids


LINES = st.text("a b\n \r\té.,'s1_中\u0301\u200d<A", max_size=60)


@given(text=st.one_of(LINES, st.text(max_size=60)), piece=st.integers(1, 9))
def test_a_long_text_in_pieces_has_the_same_ids(packed, text, piece):
    whole = packed.encode(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("civetta.chat.tokenizer.PIECE_CHARS", piece)
        assert packed.encode(text) == whole


def test_other_threads_run_while_a_long_text_is_encoded(packed, monkeypatch):
    lengths = []
    inner = packed._encode_piece
    monkeypatch.setattr(packed, "_encode_piece", lambda t: lengths.append(len(t)) or inner(t))
    packed.encode("some words and\n" * 20_000)
    assert max(lengths) < 17_000
    assert sum(lengths) == 15 * 20_000


@pytest.fixture
def turns_given():
    """No thread is made to give up the interpreter: it goes round only where one lets go of it."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(before_s)


@pytest.fixture
def handed(turns_given):
    """Two threads hand something to and fro; the entry is how often they have."""
    there, back, over = threading.Semaphore(0), threading.Semaphore(0), threading.Event()
    count = [0]

    def answer():
        while not over.is_set():
            if there.acquire(timeout=0.1):
                back.release()

    def ask():
        while not over.is_set():
            there.release()
            if back.acquire(timeout=0.1):
                count[0] += 1

    threads = [threading.Thread(target=run) for run in (answer, ask)]
    for thread in threads:
        thread.start()
    yield count
    over.set()
    for thread in threads:
        thread.join()


WORD = "qwertzuiop1234é" * 30_000
ENOUGH = 500


def test_other_threads_run_while_a_word_without_end_is_encoded(packed, handed):
    """One try of many has to show it: a busy machine may give a call to nobody else."""
    for _ in range(30):
        before = handed[0]
        ids = packed.encode(WORD)
        if handed[0] - before >= ENOUGH:
            break
    else:
        pytest.fail("nothing was handed on")
    assert packed.decode(ids) == WORD


def test_what_is_encoded_with_the_lock_held_lets_nobody_run(packed, handed, monkeypatch):
    """Else the test before this one would show nothing. A finaliser may let go for a moment."""
    monkeypatch.setattr("civetta.chat.tokenizer.LOCKED_CHARS", len(WORD))
    before = handed[0]
    packed.encode(WORD)
    assert handed[0] - before < ENOUGH


@given(text=st.text(max_size=60), locked=st.integers(0, 4))
def test_both_ways_to_the_library_give_the_same_ids(packed, text, locked):
    whole = packed.encode(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("civetta.chat.tokenizer.LOCKED_CHARS", locked)
        assert packed.encode(text) == whole


def test_lone_surrogates_are_refused(packed):
    with pytest.raises(RequestInvalid, match="surrogate"):
        packed.encode("a" * 5000 + "\ud800b")
    with pytest.raises(RequestInvalid, match="surrogate"):
        packed.encode("a\ud800b")


def test_generation_config_adds_end_tokens(tmp_path):
    write_folder(tmp_path)
    extra = added_entries()[3]["id"]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [extra]}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert extra in tokenizer.eog_ids
    assert tokenizer.eos_id == tokenizer.special_id("<|im_end|>")


def test_tokens_only_in_tokenizer_config_are_added(tmp_path):
    write_folder(tmp_path)
    document = tokenizer_json()
    last = document["added_tokens"].pop()
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    decoder = {str(last["id"]): {k: v for k, v in last.items() if k != "id"}}
    config = {"eos_token": "<|im_end|>", "added_tokens_decoder": decoder}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.from_folder(tmp_path).special_id(last["content"]) == last["id"]
    config["added_tokens_decoder"] = {"9999": decoder[str(last["id"])] | {"content": "<think>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TokenizerError, match="different ids"):
        Tokenizer.from_folder(tmp_path)


def _strip(document):
    document["added_tokens"][0]["lstrip"] = True


def _lose_byte(document):
    del document["model"]["vocab"]["!"]


def _bad_merge(document):
    document["model"]["merges"].append(["zzzz", "qqqq"])


def _odd_merge(document):
    document["model"]["merges"].append("one")


def _other_model(document):
    document["model"]["type"] = "Unigram"


def _fallback(document):
    document["model"]["byte_fallback"] = True


def _no_ends(document):
    document["added_tokens"] = document["added_tokens"][3:]


def _no_text(document):
    document["added_tokens"][0] = 7


def _same_id(document):
    document["added_tokens"][0]["id"] = document["added_tokens"][1]["id"]


@pytest.mark.parametrize(
    "damage",
    [
        _strip,
        _lose_byte,
        _bad_merge,
        _odd_merge,
        _other_model,
        _fallback,
        _no_ends,
        _no_text,
        _same_id,
    ],
)
def test_damaged_folders_are_refused(tmp_path, damage):
    document = tokenizer_json()
    damage(document)
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(TokenizerError):
        Tokenizer.from_folder(tmp_path)


def test_missing_and_unreadable_files_are_refused(tmp_path):
    with pytest.raises(TokenizerError, match="missing"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="JSON"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", "llama"),
        ("pre", "qwen2"),
        ("tokens", None),
        ("merges", None),
        ("token_type", [1, 3]),
        ("tokens", ["a"] * len(gguf_metadata()["tokenizer.ggml.tokens"])),
        ("merges", ["a"]),
        ("merges", ["zz qq"]),
        ("eos_token_id", 10**9),
        ("eos_token_id", "x"),
    ],
)
def test_damaged_gguf_metadata_is_refused(key, value):
    metadata = gguf_metadata()
    metadata[f"tokenizer.ggml.{key}"] = value
    with pytest.raises(TokenizerError):
        Tokenizer.from_gguf(metadata)


@settings(deadline=None)
@given(st.text(max_size=60))
@example("ᾂ" * 40)
@example(unicodedata.normalize("NFD", "각ᾂế" * 20))
@example("<|im_end|>" * 5)
def test_least_tokens_is_a_lower_bound(packed, text):
    assert packed.least_tokens(text) <= len(packed.encode(text))


def test_least_tokens_grows_with_the_text(packed):
    assert packed.least_tokens("x" * 100_000) > 100


def test_a_text_that_cannot_be_cut_for_a_million_characters_is_refused(packed):
    with pytest.raises(RequestInvalid, match="without a line break"):
        packed.encode("y" * (MAX_PIECE_CHARS + 1))
