from __future__ import annotations

from civetta.host import available_host_bytes


def test_the_smaller_of_machine_and_control_group_counts(tmp_path):
    assert available_host_bytes(tmp_path) == 1 << 40
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   1000 kB\n")
    assert available_host_bytes(tmp_path) == 1_024_000
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("100\n")
    for limit, wanted in (("max", 1_024_000), ("600", 500), ("50", 0)):
        (group / "memory.max").write_text(f"{limit}\n")
        assert available_host_bytes(tmp_path) == wanted


def test_this_machine_has_some_memory_left():
    assert available_host_bytes() > 0
