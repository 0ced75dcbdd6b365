from __future__ import annotations

import json

import pytest

from civetta.cli.diagnose import check_device
from civetta.model.tiny import write_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("flag", ["-m", "--validate-artifact"])
def test_a_whole_model_passes(civetta, model, flag):
    result = civetta("diagnose", flag, str(model), "--json")
    report = json.loads(result.out)
    assert (result.status, report["ok"], result.err) == (0, True, "")
    checks = {check["name"]: check for check in report["checks"]}
    assert all(check["ok"] for check in checks.values())
    assert checks["model"]["facts"]["kind"] == "safetensors"
    assert checks["model"]["facts"]["tensors"] > 10
    assert report["machine"]["cores_usable"] >= 1
    assert report["machine"]["memory_mib"] > 0


def test_text_names_every_check(civetta, model):
    result = civetta("diagnose", "-m", str(model))
    assert result.status == 0
    for name in ("civetta", "cpu", "torch", "device", "model"):
        assert [line for line in result.out.splitlines() if line.startswith(f"{name} ")]


def test_damage_fails_with_its_code(civetta, model, tmp_path):
    for item in model.iterdir():
        (tmp_path / item.name).write_bytes(item.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    result = civetta("diagnose", "--validate-artifact", str(tmp_path))
    assert result.status == 1
    assert "FAILED: error[checkpoint_malformed]" in result.out
    gone = civetta("diagnose", "--validate-artifact", str(tmp_path / "gone"), "--json")
    assert gone.status == 1
    assert "error[checkpoint_not_found]" in gone.out


def test_a_device_that_is_not_there_fails():
    check = check_device("cuda:99")
    assert not check.ok
    assert "--device cpu" in check.detail
