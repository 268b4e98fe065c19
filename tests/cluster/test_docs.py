"""The commands of README and docs. Tests that those without a reason against it run as they are written, from a fresh
clone with nothing on the PATH but what the page says to install, and leave no file in the clone; and that the programs
know the flags of all others."""

import os
import re
import shlex
import subprocess
import sys

import hosts
import pytest
from docs_checks import INSTALL_PAGE, INSTALLED, Cargo, inner
from docs_commands import ROOT, blocks, commands, pages
from harness import BINARIES

LIB = ROOT / "tests/cluster/lib"
SYSTEM = "/usr/bin:/bin:/usr/sbin:/sbin"
# A page has several starts, answers and ends, and the machine may be busy.
PAGE_S = 900

ALL = [command for page in pages() for command in commands(page)]
PLAYED = sorted({command.page for command in ALL if command.as_written})


def line_of_program(command):
    """Returns the command line of one of our programs, without what a shell or cargo does around it. Returns None for
    another command."""
    words = inner(shlex.split(re.split(r" [|>&]", command.text)[0]))
    if words[:2] == ["cargo", "run"] and (name := Cargo(words).values("--bin")):
        words = [*name, *Cargo(words).arguments]
    # Placeholders stand for any flags and for any number.
    words = ["1" if re.fullmatch("[A-Z]", word) else word for word in words if word != "FLAGS"]
    return words if words[0] in INSTALLED else None


LINES = sorted({tuple(line) for command in ALL if (line := line_of_program(command))})


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of the tree as a clone has it, in which git sees each new file."""
    folder = tmp_path_factory.mktemp("docs") / "tutti"
    folder.mkdir()
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["xargs", "-0", "cp", "-p", "--parents", "-t", folder], cwd=ROOT, input=listed.stdout, check=True)
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    for git in (("init", "-q"), ("add", "-A"), (*identity, "commit", "-q", "-m", "The tree")):
        subprocess.run(["git", *git], cwd=folder, check=True)
    return folder


def installed(page, folder):
    """Makes a folder of executables with what a page says to install."""
    folder.mkdir()
    text = page.read_text()
    built = {name: BINARIES / name for name in INSTALLED} if INSTALL_PAGE in text or page.name == INSTALL_PAGE else {}
    # The packages that pip would install are those of the tests.
    python = {name: sys.executable for name in ("python", "python3") if "pip install" in text}
    for name, path in built.items():
        (folder / name).symlink_to(path)
    for name, path in python.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {path} "$@"\n')
    (folder / "cargo").write_text(f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(LIB)!r})\nimport docs_session\ndocs_session.cargo(sys.argv[1:])\n")
    for script in folder.iterdir():
        if not script.is_symlink():
            script.chmod(0o755)
    return folder


@pytest.mark.timeout(PAGE_S)
@pytest.mark.skipif(not hosts.possible(), reason="no network namespaces here: they need root")
@pytest.mark.parametrize("page", PLAYED, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_run_as_written(clone, tmp_path, page):
    work = tmp_path / "work"
    work.mkdir()
    env = {
        "PATH": f"{installed(page, tmp_path / 'bin')}:{SYSTEM}",
        "HOME": str(tmp_path),
        "LANG": "C.UTF-8",
        "BUILT": str(BINARIES),
        # Bytecode does not go into the clone, and is compiled once for all pages.
        "PYTHONPYCACHEPREFIX": str(ROOT / "target/pycache"),
    }
    namespace = ["unshare", "--net", *hosts.ELSEWHERE]
    command = [*namespace, sys.executable, LIB / "docs_session.py", clone / page.relative_to(ROOT), clone, work]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PAGE_S)
    assert done.returncode == 0, done.stdout[-6000:]
    left = subprocess.run(["git", "status", "--porcelain"], cwd=clone, capture_output=True, text=True, check=True)
    assert not left.stdout, f"left in the clone: {left.stdout}"


@pytest.mark.parametrize("line", LINES, ids=" ".join)
def test_a_program_knows_the_flags_of_a_command(line):
    # Flags are read in their order, so those before --help are checked, and --help ends the program.
    done = subprocess.run([BINARIES / line[0], *line[1:], "--help"], capture_output=True, text=True, env={"PATH": os.defpath})
    assert done.returncode == 0, done.stderr


def test_readme_and_the_api_have_an_example_for_each_client():
    text = "".join(text for name in ("README.md", "docs/api.md") for _, text in blocks(ROOT / name))
    for word in ("curl", "import openai", "import grpc", '"stream": true'):
        assert word in text, f"neither README.md nor docs/api.md has an example with {word}"


def test_flags_that_take_the_place_of_others_exist():
    """The last column of the table for people who come from other servers names our flags."""
    text = (ROOT / "docs/coming-from-vllm.md").read_text()
    rows = re.findall(r"^\|(?:[^|]*)\|(?:[^|]*)\|([^|]*)\|$", text.split("## Routes")[0], re.M)
    named = set(re.findall(r"--[a-z][a-z-]+", "".join(rows)))
    said = subprocess.run([BINARIES / "conductor", "--help"], capture_output=True, text=True, check=True).stdout
    known = set(re.findall(r"--[a-z][a-z-]+", said))
    assert len(named) > 20 and named <= known, named - known


def test_every_language_of_blocks_is_known():
    """A block in another language may have a command that no test sees."""
    known = {"bash", "sh", "python", "text", "json", "toml", "yaml", "rust", "mermaid", "promql", ""}
    seen = {language for page in pages() for language, _ in blocks(page)}
    assert seen <= known, seen - known
