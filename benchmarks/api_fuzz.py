"""schemathesis against a server: requests made from /openapi.json, replies held against it.

    python benchmarks/api_fuzz.py [--base-url URL] [--examples 15] [--seed 1] [--save FILE]

Without --base-url it starts one with the embedded model, a small context and short replies.
Requests that fit the document and requests that do not are made for every operation. Checked of
each reply: no 5xx, a status, a content type and a body that the document names. Ends with 1 when
a check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)
FLAGS = ("-p", "0", "-c", "256", "-n", "8", "--threads", "1", "--log-level", "warn")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url")
    parser.add_argument("--examples", type=int, default=15)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=Path)
    a = parser.parse_args()
    with contextlib.nullcontext(a.base_url) if a.base_url else serving() as url:
        command = [
            str(Path(sys.executable).with_name("schemathesis")), "run", f"{url}/openapi.json",
            "-n", str(a.examples), "--seed", str(a.seed), "--checks", ",".join(CHECKS),
            "--phases", "coverage,fuzzing", "-m", "all", "--continue-on-failure", "--no-color",
        ]  # fmt: skip
        began_s = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    cases = re.search(r"(\d+) generated", done.stdout)
    operations = re.search(r"Tested: (\d+)", done.stdout)
    report = {
        "cases": int(cases[1]) if cases else 0,
        "operations": int(operations[1]) if operations else 0,
        "checks": CHECKS,
        "passed": done.returncode == 0,
        "seed": a.seed,
        "seconds": round(time.monotonic() - began_s),
    }
    text = json.dumps(report, indent=2)
    print(text if done.returncode == 0 else done.stdout + done.stderr + text)
    if a.save:
        a.save.write_text(text + "\n")
    return done.returncode


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """The address of a server of our own."""
    command = [sys.executable, "-m", "civetta", "serve", *FLAGS]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = next(line for line in process.stderr if line.startswith("civetta serves"))
            threading.Thread(target=process.stderr.read, daemon=True).start()  # no pipe fills
            url = line.split(" at ")[1].split("/v1;")[0]
            with urllib.request.urlopen(f"{url}/health"):
                yield url
        finally:
            process.terminate()


if __name__ == "__main__":
    sys.exit(main())
