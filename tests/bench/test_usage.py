from __future__ import annotations

import threading
import time

import numpy as np

from civetta.bench import usage
from civetta.bench.usage import UsageWatch, read_usage

PEAK_BYTES = 200 << 20


def test_a_peak_within_the_stretch_is_seen():
    before, _ = read_usage()
    with UsageWatch() as watch:
        block = np.ones(PEAK_BYTES, dtype=np.uint8)
        time.sleep(0.1)  # ten samples
        assert block[-1] == 1
        del block
    found = watch.usage()
    assert found.rss_peak_bytes >= before + PEAK_BYTES // 2  # freed pages of others may be reused
    assert found.device_peak_bytes == 0


def test_threads_are_counted_without_the_watch():
    with UsageWatch() as watch:
        pass
    alone = watch.usage().threads_peak
    done = threading.Event()
    workers = [threading.Thread(target=done.wait) for _ in range(5)]
    for worker in workers:
        worker.start()
    with UsageWatch() as watch:
        pass
    done.set()
    for worker in workers:
        worker.join()
    assert watch.usage().threads_peak == alone + 5


def test_a_system_without_proc_has_figures_too(monkeypatch, tmp_path):
    monkeypatch.setattr(usage, "_STATUS", tmp_path / "absent")
    rss_bytes, threads = read_usage()
    assert rss_bytes > 1 << 20
    assert threads >= 1
