"""Where a table goes, and why."""

from __future__ import annotations

import pytest
import torch
from tables import write_table

from civetta.errors import UsageError
from civetta.ngram.placement import (
    RESERVE_BYTES,
    FreeMemory,
    StoreOptions,
    choose,
    open_store,
)

CPU = torch.device("cpu")
GIB = 1 << 30


@pytest.mark.parametrize(
    ("table", "other", "host", "gpu", "on_gpu", "wanted"),
    [
        (28, 60, 128, 0, False, "ram"),
        (28, 99, 128, 0, False, "disk"),
        (28, 98, 128, 0, False, "ram"),
        (28, 80, 64, 139, True, "gpu"),
        (48, 90, 64, 139, True, "ram"),
        (48, 90, 32, 139, True, "disk"),
        (1, 0, 0, 0, False, "disk"),
    ],
)
def test_auto_takes_the_fastest_memory_with_room(table, other, host, gpu, on_gpu, wanted):
    free = FreeMemory(host_bytes=host * GIB, gpu_bytes=gpu * GIB)
    placement, reason = choose(table * GIB, other_bytes=other * GIB, free=free, on_gpu=on_gpu)
    assert placement == wanted
    assert reason


def test_the_reserve_is_kept():
    free = FreeMemory(host_bytes=RESERVE_BYTES + 10)
    assert choose(10, other_bytes=0, free=free, on_gpu=False)[0] == "ram"
    assert choose(11, other_bytes=0, free=free, on_gpu=False)[0] == "disk"


@pytest.mark.parametrize("placement", ["auto", "disk", "ram"])
def test_the_choice_is_logged(tmp_path, caplog, placement):
    table = write_table(tmp_path)
    with caplog.at_level("INFO"):
        store = open_store(
            table.layout, StoreOptions(placement=placement), device=CPU, other_bytes=5
        )
    wanted = "ram" if placement == "auto" else placement
    assert store.placement == wanted
    assert f"ngram_placement placement={wanted} reason=" in caplog.text
    assert f"table_bytes={table.layout.nbytes}" in caplog.text
    store.close()


def test_gpu_without_a_gpu(tmp_path):
    table = write_table(tmp_path)
    with pytest.raises(UsageError, match="--ngram-placement gpu needs a GPU"):
        open_store(table.layout, StoreOptions(placement="gpu"), device=CPU, other_bytes=0)
