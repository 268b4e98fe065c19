"""Shell completions and man pages. Tests that the scripts complete existing flags, and that the pages list every flag
in `--help`."""

import re
import shutil
import subprocess

import pytest
from harness import BINARIES

PROGRAMS = {
    "conductor": ("conductor",),
    "conductor-status": ("conductor", "status"),
    "conductor-drain": ("conductor", "drain"),
    "conductor-trace": ("conductor", "trace"),
    "conductor-kernels": ("conductor", "kernels"),
    "router": ("router",),
    "worker": ("worker",),
    "tutti-bench": ("tutti-bench",),
}


@pytest.fixture(scope="module")
def manuals(tmp_path_factory):
    directory = tmp_path_factory.mktemp("manuals")
    subprocess.run([BINARIES / "examples/manuals", directory], check=True)
    return directory


def flags(page):
    """Returns the long flags in an executable's `--help`."""
    program, *command = PROGRAMS[page]
    done = subprocess.run([BINARIES / program, *command, "--help"], capture_output=True, text=True, check=True)
    found = re.findall(r"^ +(?:-\w, )?(--[a-z][a-z-]*)", done.stdout, re.M)
    assert len(found) > 2, done.stdout
    return set(found)


def completed(manuals, *words):
    """Returns the completions that bash offers for the last of these words."""
    script = manuals / "bash-completion/completions" / words[0]
    subprocess.run(["bash", "-n", script], check=True)
    # The function gets the same arguments as from bash: the command, the word, and the word before it.
    complete = """
        source "$1"; shift
        COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
        function=$(complete -p "$1" | sed 's/.*-F \\([^ ]*\\).*/\\1/')
        $function "$1" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    command = ["bash", "-c", complete, "complete", script, *words]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize("page", PROGRAMS)
def test_every_flag_is_completed_and_in_the_man_page(manuals, page):
    known = flags(page)
    assert known <= completed(manuals, *PROGRAMS[page], "--")
    rendered = manuals / f"man/man1/{page}.1"
    if shutil.which("groff"):
        # The lines are wide enough that no flag is hyphenated.
        command = ["groff", "-man", "-Tascii", "-P-c", "-rLL=300n", "-ww", rendered]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stderr == "", done.stderr
        # Bold and underlined characters are printed twice, with a backspace between.
        text = re.sub(".\\x08", "", done.stdout)
        assert re.search(r"^NAME$", text, re.M) and re.search(r"^OPTIONS$", text, re.M), text[:2000]
    else:
        text = rendered.read_text().replace("\\-", "-")
        assert '.TH' in text and ".SH NAME" in text
    missing = {flag for flag in known if not re.search(rf"{flag}(?![a-z-])", text)}
    assert not missing


def test_a_flag_a_value_and_a_command_are_completed(manuals):
    assert completed(manuals, "conductor", "--max-step") == {"--max-step-tokens"}
    assert completed(manuals, "conductor", "--chunking", "") == {"scheduler", "engine", "off"}
    assert "kernels" in completed(manuals, "conductor", "ker")
    assert completed(manuals, "tutti-bench", "--api", "c") == {"completions", "chat"}


def test_the_scripts_of_other_shells_name_the_flags(manuals):
    for page in ("conductor", "router", "worker", "tutti-bench"):
        zsh = (manuals / f"zsh/site-functions/_{page}").read_text()
        fish = (manuals / f"fish/vendor_completions.d/{page}.fish").read_text()
        assert zsh.startswith(f"#compdef {page}\n")
        for flag in flags(page):
            # In zsh's script, a flag that may be repeated begins with a star.
            assert re.search(rf"'\*?(\([^)]*\))?{flag}[=\[+]", zsh) and f"-l {flag[2:]} " in fish, flag


def test_the_generator_wants_a_directory():
    done = subprocess.run([BINARIES / "examples/manuals"], capture_output=True, text=True)
    assert done.returncode == 64 and "name the directory" in done.stderr
