"""The wheel. Tests that pip installs it into an empty environment, that its executables serve from there, and that they
need no newer C library than the wheel's name states."""

import os
import re
import subprocess
import sys
import zipfile

import harness
import pytest
from harness import REPO, Server

# On a fresh machine, zig first builds its own libraries, which takes long.
pytestmark = pytest.mark.timeout(900)

PROGRAMS = ["conductor", "router", "tutti-bench", "worker"]
# The flags of the build in tests/run, so that only linking is left to do.
FLAGS = ["--workspace", "--features", "tutti/media-test-model", "--examples"]
LIBRARIES = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libutil.so.1", "ld-linux-x86-64.so.2"}


@pytest.fixture(scope="module")
def wheel():
    built = subprocess.run([REPO / "deploy/wheel/build", *FLAGS], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return REPO / built.stdout.split()[-1]


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Returns the folder of executables of an environment that has only the wheel installed."""
    root = tmp_path_factory.mktemp("wheel") / "venv"
    subprocess.run([sys.executable, "-m", "venv", root], check=True)
    pip = [root / "bin/pip", "install", "-q", "--disable-pip-version-check", "--no-index"]
    subprocess.run([*pip, wheel], check=True)
    return root / "bin"


def dynamic(program, option):
    return subprocess.run(["readelf", "-W", option, program], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_executable_asks_for_no_newer_c_library_than_the_wheel_s_name_says(wheel, installed, name):
    promised = tuple(map(int, re.search(r"manylinux_(\d+)_(\d+)_x86_64", wheel.name).groups()))
    assert promised == (2, 28)
    versions = re.findall(r"GLIBC_(\d+)\.(\d+)", dynamic(installed / name, "--version-info"))
    assert versions and max(tuple(map(int, version)) for version in versions) <= promised
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic(installed / name, "-d")))
    assert "libc.so.6" in needed and needed <= LIBRARIES
    assert ".symtab" not in dynamic(installed / name, "-S")


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_installed_executable_answers(installed, name):
    said = subprocess.run([installed / name, "--help"], capture_output=True, text=True, env={"PATH": os.defpath})
    assert said.returncode == 0 and "Usage" in said.stdout, said.stderr


def test_a_cluster_of_the_installed_executables_chats(installed, tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "BINARIES", installed)
    server = Server("conductor", ["--workers", "2"], tmp_path).wait_until_ready()
    try:
        answer = server.chat(messages=[{"role": "user", "content": "What is Tutti?"}], temperature=0)
        assert "tutti" in answer["choices"][0]["message"]["content"].lower()
    except BaseException:
        server.destroy()
        raise
    server.stop()


def test_equal_executables_make_an_equal_wheel(wheel, tmp_path):
    version = wheel.name.split("-")[1]
    command = [REPO / "deploy/wheel/pack.py", version, REPO / "target/wheel/programs", tmp_path]
    subprocess.run(command, check=True, capture_output=True)
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in archive.namelist())
