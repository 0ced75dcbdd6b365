"""`civetta diagnose`: facts about this machine, and a proof that model files are whole."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from civetta import __version__
from civetta.cli.interrupts import interrupts_deferred
from civetta.cli.options import settings_command
from civetta.errors import CivettaError, OutputFailed, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from civetta.options import Settings

SECTIONS = ("all", "inventory", "platform", "gpu")
NATIVE_MODULE = "civetta.kernels._native"
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One question with its answer; `detail` is a sentence when it failed."""

    name: str
    ok: bool
    detail: str
    facts: dict[str, Any] = field(default_factory=dict)


@click.command(short_help="Check this machine and model files.")
@click.option(
    "--validate-artifact",
    metavar="PATH",
    help="Model to check: header, sizes, and every tensor's name, type and shape.",
)
@click.option(
    "--benchmark",
    type=click.Choice(["ngram", "bandwidth", "allocation"]),
    metavar="WHAT",
    help="Measure instead: ngram reads the n-gram table's disk by every reader, bandwidth copies"
    " memory, allocation takes fresh memory.",
)
@click.option("--backends", metavar="NAMES", help="Memory to measure: cpu, cuda, hip. [cpu]")
@click.option("--warmup", metavar="N", type=click.IntRange(0, 10_000), help="Runs before. [3]")
@click.option("--repetitions", metavar="N", type=click.IntRange(1, 10_000), help="Runs. [10]")
@click.option(
    "--duration-ms",
    metavar="MS",
    type=click.IntRange(1, 3_600_000),
    help="No run begins later than this. [2000]",
)
@click.option(
    "--working-set-mib", metavar="MIB", type=click.IntRange(1, 1 << 20), help="Memory a run. [64]"
)
@click.option(
    "--section",
    type=click.Choice(SECTIONS),
    metavar="NAME",
    help="Print one part: inventory is the machine, platform torch and --device, gpu the GPUs. One"
    " of all, inventory, platform, gpu. [all]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--fingerprint",
    "as_fingerprint",
    is_flag=True,
    help="Print what kind of machine this is, and its SHA-256; no host or user names.",
)
@click.option("--output", metavar="FILE", help="Write the JSON object to FILE as well.")
@settings_command("model")
def diagnose(
    settings: Settings,
    validate_artifact: str | None,
    benchmark: str | None,
    section: str | None,
    as_json: bool,
    as_fingerprint: bool,
    output: str | None,
    **measuring: int | str | None,
) -> int:
    """Print facts about this machine and check model files; exit 1 when a check fails."""
    given = {f"--{name.replace('_', '-')}": value for name, value in measuring.items()}
    _check_combinations(
        {
            "--fingerprint": as_fingerprint or None,
            "--benchmark": benchmark,
            "--section": section,
            "--validate-artifact": validate_artifact,
            "--output": output,
            "--json": as_json or None,
        },
        given,
    )
    if as_fingerprint:
        click.echo(json.dumps(fingerprint(machine_facts(), check_torch()), indent=2))
        return 0
    if benchmark is not None:
        return _run_benchmark(benchmark, settings, measuring, as_json=as_json)
    report = _report(settings, section or "all", validate_artifact)
    text = msgspec.json.format(msgspec.json.encode(report.as_json()), indent=2).decode()
    if output is not None:
        _write(Path(output), text)
    if as_json:
        click.echo(text)
    else:
        _print(report.facts, report.checks)
    return 0 if report.ok else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    facts: dict[str, Any]
    checks: list[Check]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        checks = [asdict(check) for check in self.checks]
        return {"ok": self.ok, "machine": self.facts, "checks": checks}


def _report(settings: Settings, section: str, validate_artifact: str | None) -> _Report:
    device = settings.model.device
    if section == "inventory":
        return _Report(facts=machine_facts(), checks=[])
    if section == "platform":
        return _Report(facts={}, checks=[check_torch(), check_device(device)])
    if section == "gpu":
        return _Report(facts={"gpus": check_torch().facts.get("gpus", [])}, checks=[])
    model = check_model(validate_artifact or settings.model.model)
    checks = [check_torch(), check_device(device), model]
    return _Report(facts=machine_facts(), checks=checks)


def _check_combinations(modes: Mapping[str, object], measuring: Mapping[str, object]) -> None:
    """Raise UsageError for flags of diagnose that mean nothing together."""
    there = [flag for flag, value in modes.items() if value is not None]
    if "--fingerprint" in there and len(there) > 1:
        raise UsageError("--fingerprint goes alone: leave out the other flags of diagnose.")
    if "--benchmark" in there and set(there) - {"--benchmark", "--json"}:
        raise UsageError(
            "--benchmark goes without --output, --section and --validate-artifact: drop one."
        )
    if "--section" in there and "--validate-artifact" in there and modes["--section"] != "all":
        raise UsageError("--validate-artifact needs --section all: drop one of them.")
    for flag, value in measuring.items():
        if value is not None and modes["--benchmark"] not in ("bandwidth", "allocation"):
            raise UsageError(f"{flag} goes with --benchmark bandwidth or allocation only.")


def _run_benchmark(
    what: str, settings: Settings, measuring: Mapping[str, Any], *, as_json: bool
) -> int:
    if what == "ngram":
        from civetta.cli.ngram_benchmark import run_ngram_benchmark

        return run_ngram_benchmark(settings.model, as_json=as_json)
    from civetta.cli.memory_benchmark import MemoryCase, parse_backends, run_memory_benchmark

    values = {"warmup": 3, "repetitions": 10, "duration_ms": 2000, "working_set_mib": 64}
    values |= {name: measuring[name] for name in values if measuring[name] is not None}
    backends = parse_backends(measuring["backends"] or "cpu")
    return run_memory_benchmark(what, backends, MemoryCase(**values), as_json=as_json)


def machine_facts() -> dict[str, Any]:
    """What this process can see of the machine; no host or user names."""
    return {
        "civetta": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cores_usable": _usable_cores(),
        "cores": os.cpu_count() or 0,
        "memory_mib": _memory("MemTotal"),
        "memory_available_mib": _memory("MemAvailable"),
        "native_extension": importlib.util.find_spec(NATIVE_MODULE) is not None,
    }


def fingerprint(facts: dict[str, Any], torch_check: Check) -> dict[str, Any]:
    """The lasting facts of a machine and the SHA-256 of their canonical JSON.

    What changes from run to run (free memory) or with an update (versions) is left out.
    """
    machine = {name: facts[name] for name in ("machine", "cpu", "cores", "memory_mib")}
    machine["system"] = str(facts["system"]).partition(" ")[0]
    machine["gpus"] = torch_check.facts.get("gpus", [])
    canonical = json.dumps(machine, sort_keys=True, separators=(",", ":"))
    return {"machine": machine, "sha256": hashlib.sha256(canonical.encode()).hexdigest()}


def check_torch() -> Check:
    """Whether torch is there and computes."""
    try:
        with interrupts_deferred():
            import torch
    except ImportError as error:
        return Check(
            name="torch", ok=False, detail=f"{error}: install it with pip install 'civetta[cpu]'."
        )
    facts = {
        "version": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "gpus": _gpus(torch),
    }
    total = float(torch.ones(8, 8).matmul(torch.ones(8, 8)).sum())
    if total != 8.0 * 64:
        return Check(name="torch", ok=False, detail="A product came out wrong.", facts=facts)
    return Check(name="torch", ok=True, detail=f"version {torch.__version__}", facts=facts)


def check_device(device: str) -> Check:
    """Whether the device that --device names is there."""
    if device in ("auto", "cpu"):
        return Check(name="device", ok=True, detail=device)
    try:
        import torch

        index = int(device.partition(":")[2] or 0)
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    except ImportError:
        count, index = 0, 0
    if index >= count:
        detail = f"{device} is not there: torch sees {count} GPUs, use --device cpu."
        return Check(name="device", ok=False, detail=detail)
    return Check(name="device", ok=True, detail=device)


def check_model(path: str | None) -> Check:
    """Whether the model at `path` (None: the embedded one) is whole; reads no weights."""
    try:
        with interrupts_deferred():
            from civetta.model import build, embedded
    except ImportError as error:
        return Check(name="model", ok=False, detail=f"{error}: a model needs torch.")
    try:
        where = Path(path) if path is not None else Path(embedded.embedded_model_path())
        checked = build.check_checkpoint(where)
    except CivettaError as error:
        return Check(name="model", ok=False, detail=f"error[{error.code}]: {error.message}")
    except OSError as error:
        return Check(name="model", ok=False, detail=f"Cannot write the embedded model: {error}.")
    facts = {
        "path": str(where),
        "kind": checked.checkpoint.kind,
        "tensors": len(checked.checkpoint.tensors),
        "ignored": dict(checked.ignored),
    }
    return Check(
        name="model", ok=True, detail=f"{where}: {facts['tensors']} tensors, all in place.",
        facts=facts,
    )  # fmt: skip


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputFailed.at(str(path), error) from error


def _print(facts: dict[str, Any], checks: list[Check]) -> None:
    for name, value in facts.items():
        click.echo(f"{name:22} {value}")
    for check in checks:
        click.echo(f"{check.name:22} {'ok' if check.ok else 'FAILED'}: {check.detail}")
        for name, value in check.facts.items():
            if value not in (None, [], {}):
                click.echo(f"  {name:20} {value}")


def _gpus(torch: Any) -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    return [{"name": gpu.name, "memory_mib": gpu.total_memory // _MIB} for gpu in found]


def _cpu_name() -> str:
    for line in _lines("/proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "Hardware"):
            return value.strip()
    return platform.processor() or "unknown"


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # Linux: what a container or taskset leaves
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory(key: str) -> int | None:
    for line in _lines("/proc/meminfo"):
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) // 1024
    return None


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
