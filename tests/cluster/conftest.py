"""Fixtures: clusters shared by a session, clusters for a single test, and figures printed at the end."""

import pathlib
import sys

import pytest

# An assertion of a library names its values, too.
pytest.register_assert_rewrite(*(file.stem for file in pathlib.Path(__file__).with_name("lib").glob("*.py")))

from harness import GOLDENS, REPO, Process  # noqa: E402
from launcher import launcher  # noqa: E402
from not_finite import poison  # noqa: E402

sys.path.insert(0, str(REPO / "target/stubs"))

FIGURES = pytest.StashKey[list]()


def pytest_configure(config):
    config.stash[FIGURES] = []


def pytest_sessionfinish(session):
    """Gives the figures of one of several processes to the one that prints them."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["figures"] = session.config.stash[FIGURES]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    node.config.stash[FIGURES] += getattr(node, "workeroutput", {}).get("figures", [])


def pytest_terminal_summary(terminalreporter, config):
    for line in config.stash[FIGURES]:
        terminalreporter.write_line(f"figure: {line}")


@pytest.fixture
def figure(pytestconfig):
    """Call it with a line to be printed under the test results."""
    return pytestconfig.stash[FIGURES].append


@pytest.fixture
def start(tmp_path):
    """Starts a conductor (or name="router") with these arguments; Ctrl-C at the end must leave nothing."""
    start, finish = launcher(tmp_path)
    yield start
    finish()


@pytest.fixture
def spawn(tmp_path):
    """Starts an executable that serves no address; it is killed at the end."""
    started = []

    def spawn(name, *args, env=None, under=()):
        started.append(Process(name, args, tmp_path, env, under))
        return started[-1]

    yield spawn
    for process in started:
        process.destroy()


@pytest.fixture
def poisoned(tmp_path):
    """A checkpoint in which the embedding of one token is NaN."""
    return poison(tmp_path)


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    start, finish = launcher(tmp_path_factory.mktemp("shared"))
    yield start
    finish()


@pytest.fixture(scope="session")
def tiny(shared):
    """Two workers serving the shipped model. Tests leave it as they found it."""
    return shared("--workers", 2)


@pytest.fixture(scope="session")
def bare(shared):
    """Two workers serving a random model without a tokenizer: token ids in and out."""
    return shared("--workers", 2, "--model", GOLDENS / "seed0/qwen3", "--skip-tokenizer-init")
