from __future__ import annotations

import hashlib
import json
import platform

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


def test_the_fingerprint_is_of_the_machine_alone(civetta):
    first, second = civetta("diagnose", "--fingerprint"), civetta("diagnose", "--fingerprint")
    assert (first.status, first.out) == (0, second.out)
    report = json.loads(first.out)
    assert set(report["machine"]) == {"machine", "cpu", "cores", "memory_mib", "system", "gpus"}
    canonical = json.dumps(report["machine"], sort_keys=True, separators=(",", ":"))
    assert report["sha256"] == hashlib.sha256(canonical.encode()).hexdigest()
    assert platform.node() not in first.out


def test_the_report_goes_to_a_file_too(civetta, tmp_path):
    target = tmp_path / "report.json"
    result = civetta("diagnose", "--json", "--output", str(target))
    assert (result.status, target.read_text()) == (0, result.out)
    failed = civetta("diagnose", "--output", str(tmp_path / "no" / "report.json"))
    assert failed.status == 1
    assert "error[output_failed]: Cannot write the result to" in failed.err


@pytest.mark.parametrize(
    "flags",
    [
        ["--fingerprint", "--json"],
        ["--fingerprint", "--output", "x"],
        ["--benchmark", "ngram", "--output", "x"],
        ["--benchmark", "ngram", "--validate-artifact", "x"],
        ["--benchmark", "bandwidth", "--section", "gpu"],
        ["--benchmark", "ngram", "--warmup", "1"],
        ["--fingerprint", "--section", "gpu"],
        ["--section", "gpu", "--validate-artifact", "x"],
        ["--section", "disk"],
        ["--repetitions", "3"],
        ["--benchmark", "bandwidth", "--repetitions", "0"],
        ["--benchmark", "bandwidth", "--working-set-mib", "0"],
        ["--benchmark", "bandwidth", "--backends", "cpu,tpu"],
    ],
)
def test_flags_that_exclude_each_other(civetta, flags):
    result = civetta("diagnose", *flags)
    assert (result.status, result.out) == (2, "")
    assert "error[usage]" in result.err


def test_sections_are_parts_of_the_whole(civetta):
    whole = json.loads(civetta("diagnose", "--json", "--section", "all").out)
    parts = {
        name: json.loads(civetta("diagnose", "--json", "--section", name).out)
        for name in ("inventory", "platform", "gpu")
    }
    assert parts["inventory"]["machine"].keys() == whole["machine"].keys()
    assert parts["inventory"]["checks"] == []
    assert [check["name"] for check in parts["platform"]["checks"]] == ["torch", "device"]
    assert parts["gpu"]["machine"] == {"gpus": whole["checks"][0]["facts"]["gpus"]}


@pytest.mark.parametrize("what", ["bandwidth", "allocation"])
def test_memory_is_measured(civetta, what):
    flags = ["--warmup", "0", "--repetitions", "3", "--working-set-mib", "1"]
    report = json.loads(civetta("diagnose", "--benchmark", what, "--json", *flags).out)
    (rate,) = report["rates"]
    assert rate["backend"] == "cpu"
    assert rate["runs"] == 3
    assert 0 < rate["least_gb_s"] <= rate["median_gb_s"] <= rate["most_gb_s"] < 10_000
    short = ["--duration-ms", "1", "--repetitions", "10000", "--working-set-mib", "64"]
    report = json.loads(civetta("diagnose", "--benchmark", what, "--json", *short).out)
    assert 1 <= report["rates"][0]["runs"] < 10_000
    text = civetta("diagnose", "--benchmark", what, *flags).out
    assert text.startswith(f"{what} cpu: ")


def test_a_backend_that_is_not_there_is_named(civetta, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = civetta("diagnose", "--benchmark", "bandwidth", "--backends", "cuda")
    assert (result.status, result.out) == (2, "")
    assert "torch sees no GPU" in result.err
