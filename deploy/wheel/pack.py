#!/usr/bin/env python3
"""Packs executables into a wheel.

    deploy/wheel/pack.py VERSION BINARIES OUT

Prints the path of the wheel. The same executables always give the same bytes, since times and the order of files are
fixed."""

import base64
import hashlib
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ["conductor", "router", "tutti-bench", "worker"]
# The wheel's platform tag: the oldest supported C library (glibc 2.28), and the processor.
PLATFORM = "manylinux_2_28_x86_64"
TIME = (1980, 1, 1, 0, 0, 0)
EXECUTABLE, PLAIN = 0o100755, 0o100644


def metadata(version):
    """Returns the wheel's METADATA file: its fields and, as the long description, README.md."""
    fields = [
        "Metadata-Version: 2.4",
        "Name: tutti",
        f"Version: {version}",
        "Summary: A multi-process, disaggregated serving cluster for large language models",
        "License-Expression: Apache-2.0",
        "License-File: LICENSE",
        "Description-Content-Type: text/markdown",
    ]
    return ("\n".join(fields) + "\n\n" + (ROOT / "README.md").read_text()).encode()


def record_line(name, content):
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}\n"


def main():
    version, binaries, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    tag = f"py3-none-{PLATFORM}"
    info = f"tutti-{version}.dist-info"
    wheel = f"Wheel-Version: 1.0\nGenerator: deploy/wheel\nRoot-Is-Purelib: false\nTag: {tag}\n"
    files = [(f"tutti-{version}.data/scripts/{name}", (binaries / name).read_bytes(), EXECUTABLE) for name in PROGRAMS]
    files += [
        (f"{info}/METADATA", metadata(version), PLAIN),
        (f"{info}/WHEEL", wheel.encode(), PLAIN),
        (f"{info}/licenses/LICENSE", (ROOT / "LICENSE").read_bytes(), PLAIN),
    ]
    record = "".join(record_line(name, content) for name, content, _ in files) + f"{info}/RECORD,,\n"
    files.append((f"{info}/RECORD", record.encode(), PLAIN))

    out.mkdir(parents=True, exist_ok=True)
    path = out / f"tutti-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for name, content, mode in files:
            entry = zipfile.ZipInfo(name, TIME)
            entry.external_attr = mode << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    print(path)


main()
