"""Every format a table comes in: gathered rows are the rows of the dequantized tensor, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tables import write_table

from civetta.checkpoint import formats
from civetta.checkpoint.quant import QuantTensor
from civetta.errors import ReadFailed
from civetta.kernels.dequant.reference import dequantize
from civetta.ngram.decode import RowDecoder
from civetta.ngram.disk_rows import DiskRows
from civetta.ngram.layout import Field
from civetta.ngram.resident_rows import ResidentRows

CPU = torch.device("cpu")
IN_BLOCKS = [f for f in formats.BLOCK_FORMATS if f.block_values in (32, 64)]
ASKED = np.array([[3, 299, 0, 3], [150, 151, 149, 298]])


def stores(layout):
    yield DiskRows(layout)
    yield DiskRows(layout, reader="python", cache_bytes=0, direct=False)
    yield ResidentRows(layout, placement="ram", device=CPU)
    yield ResidentRows(layout, placement="gpu", device=CPU)


def gathered(layout, dtype=torch.float32):
    found = []
    for store in stores(layout):
        decoder = RowDecoder(layout, device=CPU, dtype=dtype)
        found.append(decoder.decode(store.submit(ASKED.reshape(-1)).wait()))
        found.append(decoder.decode(*(store.submit(asked).wait() for asked in ASKED)))
        store.close()
    for other in found[1:]:
        assert torch.equal(bits(found[0]), bits(other))
    return found[0]


def bits(x):
    """The bits of numbers; which NaN comes of two NaNs is not defined, and random halves have some."""
    x = x.masked_fill(x.isnan(), 1234.5)
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "fmt", [*IN_BLOCKS, formats.BF16, formats.F16, formats.F32], ids=lambda f: f.name
)
def test_formats_whose_scales_lie_in_the_row(tmp_path, fmt, dtype):
    table = write_table(tmp_path, fmt=fmt, cols=192, rows=300, shards=4, files=2, shuffled=True)
    whole = QuantTensor(format=fmt, data_RB=torch.from_numpy(table.stored_RB), cols=192)
    wanted = dequantize(whole, dtype)[torch.from_numpy(ASKED.reshape(-1))]
    assert torch.equal(bits(gathered(table.layout, dtype)), bits(wanted))


@pytest.mark.parametrize("scales", ["none", "one", "each shard", "blocks"])
def test_fp8(tmp_path, scales):
    table = write_table(tmp_path, fmt=formats.F8_E4M3, cols=160, rows=300, shards=2)
    rng = torch.Generator().manual_seed(0)
    shared = torch.rand(1, generator=rng)
    (field,) = table.layout.fields
    shards, parts = [], []
    for n, shard in enumerate(field.shards):
        scale = {
            "none": None,
            "one": shared,
            "each shard": torch.rand(1, generator=rng),
            "blocks": torch.rand(2, 2, generator=rng).to(torch.bfloat16),
        }[scales]
        shards.append(replace(shard, scale=scale))
        data = torch.from_numpy(table.stored_RB[n * 150 : (n + 1) * 150])
        parts.append(
            dequantize(QuantTensor(format=formats.F8_E4M3, data_RB=data, cols=160, scale=scale))
        )
    layout = replace(table.layout, fields=(replace(field, shards=tuple(shards)),))
    wanted = torch.cat(parts)[torch.from_numpy(ASKED.reshape(-1))]
    assert torch.equal(bits(gathered(layout)), bits(wanted))


@pytest.mark.parametrize("packed", [True, False], ids=["scales in the row", "two tensors"])
def test_nvfp4(tmp_path, packed):
    """Codes and group scales side by side, or in tensors of their own (two pieces a row)."""
    whole = write_table(tmp_path, fmt=formats.U8, cols=90, rows=300, shards=2, seed=5)
    codes, scales = whole.stored_RB[:, :80].copy(), whole.stored_RB[:, 80:].copy()
    scale_2 = torch.tensor([0.37])
    fields = whole.layout.fields
    if not packed:
        for name, data in (("codes", codes), ("scales", scales)):
            (tmp_path / name).write_bytes(b"x" * 33 + data.tobytes())
        fields = tuple(
            Field(
                row_bytes=width,
                shards=tuple(
                    replace(shard, path=tmp_path / name, offset=33 + n * 150 * width)
                    for n, shard in enumerate(fields[0].shards)
                ),
            )
            for name, width in (("codes", 80), ("scales", 10))
        )
    first = tuple(replace(shard, scale_2=scale_2) for shard in fields[0].shards)
    layout = replace(
        whole.layout,
        format=formats.NVFP4,
        cols=160,
        fields=(replace(fields[0], shards=first), *fields[1:]),
    )
    assert layout.row_bytes == 90
    wanted = dequantize(
        QuantTensor(
            format=formats.NVFP4,
            data_RB=torch.from_numpy(codes),
            cols=160,
            scale=torch.from_numpy(scales),
            scale_2=scale_2,
        )
    )
    assert torch.equal(bits(gathered(layout)), bits(wanted[torch.from_numpy(ASKED.reshape(-1))]))


def test_a_resident_table_that_cannot_be_read(tmp_path, monkeypatch):
    table = write_table(tmp_path)

    def cut(*_):
        return 0

    monkeypatch.setattr("civetta.ngram.resident_rows.os.preadv", cut)
    with pytest.raises(ReadFailed, match="inside the n-gram table"):
        ResidentRows(table.layout, placement="ram", device=CPU)


def test_a_resident_ticket_is_spent(tmp_path):
    table = write_table(tmp_path)
    store = ResidentRows(table.layout, placement="ram", device=CPU)
    ticket = store.submit(np.array([1]))
    ticket.wait()
    with pytest.raises(ReadFailed, match="given up"):
        ticket.wait()
    store.close()
