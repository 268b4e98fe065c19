"""Checks of the commands in README and docs that need no build: cargo's against the manifests, scripts against their
text, and what a fresh clone lacks against what the page tells to make first."""

import functools
import json
import os
import re
import shlex
import subprocess

from docs_commands import PROGRAMS, ROOT

SUBCOMMANDS = {"run", "build", "test", "bench", "clippy", "fmt", "doc", "install"}
# Cargo's options that a page may use. True if an option takes a value.
OPTIONS = {
    "-p": True, "--bin": True, "--example": True, "--test": True, "--bench": True, "--features": True, "--path": True,
    "--workspace": False, "--release": False, "--bins": False, "--examples": False, "--all-targets": False,
    "--all": False, "--check": False, "--locked": False, "-q": False,
}  # fmt: skip
# Folders whose sources declare flags of benches.
BENCH_SOURCES = ("tests/measure/src", "tests/bench/support")
# Things that scripts need and a fresh clone lacks, each with the command that makes it.
NEEDS = {"target/venv": "tests/tools/venv", "target/goldens": "tests/goldens/generate", "the executables": "cargo build"}
# The section that tells how to make it.
NEEDS_SECTION = "#what-do-the-scripts-need"
# Scripts with a command as their last arguments, whose flags are not theirs.
RUNS_A_COMMAND = ("emulated-gpu/run",)
# Executables that are on the PATH once Tutti is installed.
INSTALLED = ("conductor", "router", "worker", "tutti-bench")
INSTALL_PAGE = "install.md"


def words(command):
    """Returns the words of a command, without variables before the program."""
    found = shlex.split(command)
    while found and re.match(r"[A-Z_]+=", found[0]):
        found.pop(0)
    return found


@functools.cache
def packages():
    """Returns {name: package} of the workspace, as cargo describes them."""
    command = ["cargo", "metadata", "--no-deps", "--format-version", "1", "--offline"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {package["name"]: package for package in json.loads(done.stdout)["packages"]}


class Cargo:
    """A command of cargo, parsed: its options, and the arguments behind `--`."""

    def __init__(self, words):
        self.subcommand, rest = words[1], words[2:]
        split = rest.index("--") if "--" in rest else len(rest)
        self.options, self.arguments, self.unknown, given = [], rest[split + 1 :], [], iter(rest[:split])
        for word in given:
            if word not in OPTIONS:
                self.unknown.append(word)
            else:
                self.options.append((word, next(given) if OPTIONS[word] else None))

    def values(self, option):
        return [value for name, value in self.options if name == option]

    def packages(self):
        """Returns the packages that the command selects: without an option, the package of the root alone."""
        if any(name in ("--workspace", "--all") for name, _ in self.options):
            return packages().values()
        return [packages().get(name) for name in self.values("-p") or ["tutti"]]

    def problems(self):
        if self.subcommand not in SUBCOMMANDS:
            yield f"cargo {self.subcommand} is not known here"
        yield from (f"cargo has no option {word}, or none that is known here" for word in self.unknown)
        yield from (f"no folder {path} with a package" for path in self.values("--path") if not (ROOT / path / "Cargo.toml").exists())
        selected = self.packages()
        if None in selected:
            yield f"no package {self.values('-p')}"
            return
        for kind in ("bin", "example", "test", "bench"):
            # A name in capitals stands for any name.
            for name in (name for name in self.values(f"--{kind}") if not name.isupper()):
                target = next((t for p in selected for t in p["targets"] if t["name"] == name and kind in t["kind"]), None)
                if target is None:
                    yield f"no {kind} {name} in {', '.join(p['name'] for p in selected)}"
                elif kind == "bench":
                    yield from bench_problems(target, self.arguments)
        for feature in self.values("--features"):
            package, _, name = feature.rpartition("/")
            if name not in packages().get(package or "tutti", {}).get("features", {}):
                yield f"no feature {feature}"


def bench_problems(target, arguments):
    """Yields flags that a bench does not declare."""
    sources = [target["src_path"], *(path for folder in BENCH_SOURCES for path in (ROOT / folder).rglob("*.rs"))]
    text = "".join(open(path).read() for path in sources)
    for flag in arguments:
        # A flag is a field of a struct for clap, or a text that is compared with each argument.
        declared = rf'^ +(pub )?{flag[2:].replace("-", "_")}: |"{flag}"'
        if flag.startswith("--") and not re.search(declared, text, re.M):
            yield f"the bench {target['name']} has no flag {flag}"


def script_text(path, depth=2):
    """Returns the text of a script and of the files of the tree that it names."""
    text = path.read_text(errors="replace")
    for name in set(re.findall(r"\b(?:tests|deploy|emulated-gpu)/[\w./-]+", text)) if depth else ():
        if (ROOT / name).is_file() and ROOT / name != path:
            text += script_text(ROOT / name, depth - 1)
    return text


def names(flag, text):
    """True if a text names a flag, and not only a longer one."""
    return re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", text)


def script_problems(program, arguments):
    """Yields what is wrong with a script and its flags."""
    path = ROOT / program
    if not path.is_file() or not os.access(path, os.X_OK):
        yield f"{program} is not an executable file"
        return
    text = script_text(path)
    yield from (f"{program} has no flag {flag}" for flag in arguments if flag.startswith("--") and not names(flag.split("=")[0], text))


def needs(program):
    """Returns what a script needs that a fresh clone lacks, by its text and by the comment at its beginning."""
    text = (ROOT / program).read_text(errors="replace")
    head = re.match(r"(?:#.*\n)+|#.*\n\"\"\".*?\"\"\"", text, re.S)
    head = re.sub(r"\n# ?", " ", head.group()) if head else ""
    found = [what for what in NEEDS if re.search(rf"[Nn]eeds[^.]*{what}", head)]
    uses = [folder for folder in NEEDS if f"{folder}/" in text and NEEDS[folder] not in text and folder not in found]
    return found + [folder for folder in uses if program != NEEDS[folder]]


def inner(words):
    """Returns the words of a command without a script that only runs it."""
    if words[0] in RUNS_A_COMMAND:
        return next((words[at:] for at in range(1, len(words)) if words[at] == "cargo" or "/" in words[at]), words)
    return words


def missing(command, program, page_text):
    """Yields what a fresh clone lacks for a program, unless the page says how to get it."""
    made = re.findall(r"^(?:tests/tools/venv|tests/goldens/generate|cargo build)\b", page_text, re.M)
    if f"testing.md{NEEDS_SECTION}" not in page_text and command.page.name != "testing.md":
        lacks = ["target/venv"] if program.startswith("target/venv/") else needs(program) if (ROOT / program).is_file() else []
        if lacks := [what for what in lacks if NEEDS[what] not in made]:
            yield f"{program} needs {' and '.join(lacks)}, so the page must make it, or link to testing.md{NEEDS_SECTION}"
    if program in INSTALLED and command.page.name != INSTALL_PAGE and INSTALL_PAGE not in page_text:
        yield f"{program} is on no PATH yet, so the page must link to {INSTALL_PAGE}"


def problems(command, page_text):
    """Yields what would fail if somebody typed the command in a fresh clone. `page_text` is its page."""
    for part in re.split(r" && | \| ", command.text):
        found = inner(words(re.sub(r" > \S+$", "", part)))
        program, *arguments = found
        if program == "cargo":
            yield from Cargo(found).problems()
        elif re.match(r"(tests|deploy|emulated-gpu)/", program):
            yield from script_problems(program, arguments)
        if command.block is not None:
            yield from missing(command, program, page_text)


def indented(page):
    """Yields commands outside of blocks, which would need no entry."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for line in re.finditer(rf"^ {{4}}{PROGRAMS} .*", text, re.M):
        yield f"a command outside of a block: {line.group().strip()}"
