"""Make a virtual environment that fits this machine and install civetta with its test tools.

Run by `make`; needs nothing but Python 3.11-3.13. torch is chosen by what is here: with an NVIDIA
or AMD GPU the build for it, else the CPU build, which is a tenth of the size; `make TORCH=cpu`
takes the CPU build on any machine.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST, NEWEST = (3, 11), (3, 13)
TORCH_FLOOR = "2.11"
CPU_TORCH = "2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
ROCM_INDEX = "https://download.pytorch.org/whl/rocm6.4"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--torch", choices=("auto", "cpu"), default="auto")
    given = parser.parse_args()
    folder = given.venv
    interpreter = fitting_python()
    if interpreter is not None:
        raise SystemExit(
            subprocess.run(
                [interpreter, __file__, "--venv", str(folder), "--torch", given.torch], check=False
            ).returncode
        )
    if not (folder / "bin" / "python").exists():
        print(f"creating {folder}", flush=True)
        venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    pip(python, "install", "--upgrade", "pip")
    if not has_torch(python):
        install_torch(python, cpu_only=given.torch == "cpu")
    print("installing civetta and its test tools", flush=True)
    pip(python, "install", "--editable", f"{ROOT}[dev]")


def fitting_python() -> str | None:
    """Another interpreter to use when this one is too old or too new, None when it fits."""
    if OLDEST <= sys.version_info[:2] <= NEWEST:
        return None
    for minor in range(NEWEST[1], OLDEST[1] - 1, -1):
        found = shutil.which(f"python3.{minor}")
        if found:
            return found
    raise SystemExit("civetta needs Python 3.11, 3.12 or 3.13; install one and run make again")


def pip(python: str, *words: str, quiet: bool = True) -> None:
    command = [python, "-m", "pip", *words, *(["--quiet"] if quiet else [])]
    if subprocess.run(command, check=False).returncode:
        raise SystemExit(f"pip failed; the command was: {' '.join(command)}")


def has_torch(python: str) -> bool:
    """Whether a torch that is new enough is there already; then it is left alone."""
    test = (
        "import torch; v = tuple(int(x) for x in torch.__version__.split('+')[0].split('.')[:2]);"
        f"raise SystemExit(v < {tuple(int(x) for x in TORCH_FLOOR.split('.'))})"
    )
    return not subprocess.run(
        [python, "-c", test], stderr=subprocess.DEVNULL, check=False
    ).returncode


def install_torch(python: str, *, cpu_only: bool) -> None:
    large = "several gigabytes; stop and run make TORCH=cpu for the CPU build, a tenth of that"
    if not cpu_only and (Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi")):
        print(f"NVIDIA GPU found: downloading torch with CUDA ({large})", flush=True)
        return pip(python, "install", f"torch>={TORCH_FLOOR}", "triton")
    if not cpu_only and Path("/dev/kfd").exists():
        print(f"AMD GPU found: downloading torch with ROCm ({large})", flush=True)
        return pip(python, "install", f"torch>={TORCH_FLOOR}", "--index-url", ROCM_INDEX)
    why = "as asked" if cpu_only else "no GPU found"
    print(f"{why}: installing the CPU build of torch", flush=True)
    cpu_build = [python, "-m", "pip", "install", "--quiet", f"torch=={CPU_TORCH}+cpu"]
    for extra in ([], ["--extra-index-url", CPU_INDEX]):
        if not subprocess.run(
            [*cpu_build, *extra], stderr=subprocess.DEVNULL, check=False
        ).returncode:
            return None
    print(
        "no CPU build can be reached: downloading torch as the package index has it, which may be"
        " several gigabytes",
        flush=True,
    )
    return pip(python, "install", f"torch>={TORCH_FLOOR}")


if __name__ == "__main__":
    main()
