"""Fixtures: clusters shared by a session, clusters for a single test, and figures printed at the end."""

import pathlib
import sys

import pytest

# With this, a failed assertion in a file of lib also shows its values.
pytest.register_assert_rewrite(*(file.stem for file in pathlib.Path(__file__).with_name("lib").glob("*.py")))

from harness import GOLDENS, REPO, Process  # noqa: E402
from launcher import launcher  # noqa: E402
from not_finite import poison  # noqa: E402
from sampling_of_parameters import sampled  # noqa: E402

sys.path.insert(0, str(REPO / "target/stubs"))

FIGURES = pytest.StashKey[list]()

# Files that take a minute or more. They begin first, so that no process works on one of them when the others have
# ended.
LONG = (
    "test_wheel.py", "test_sim.py", "test_kv_fp8.py", "test_families.py", "test_images.py", "test_chaos.py", "test_disaggregation.py",
    "test_docs.py", "test_memory.py", "test_stuck_log.py",
)
# Those of them whose tests share no cluster: any process runs any of their tests.
DIVIDED = ("test_sim.py", "test_kv_fp8.py", "test_families.py", "test_chaos.py", "test_disaggregation.py", "test_memory.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `--dist loadfile`, gives processes whole files, because tests of a file share clusters, and single tests of
    divided files."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return nodeid if file.rpartition("/")[2] in DIVIDED else file

    return Scheduling(config, log)


def pytest_addoption(parser):
    parser.addoption("--sample-parameters", metavar="SEED", help="run a sixth of each test's parameters, and half of the attacks")
    parser.addoption("--third", action="store_true", help="with --sample-parameters: a third of the tests")


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
    if seed := config.getoption("--sample-parameters"):
        items[:], left_out = sampled(items, seed, config.getoption("--third"))
        config.hook.pytest_deselected(items=left_out)


def pytest_configure(config):
    config.stash[FIGURES] = []


def pytest_sessionfinish(session):
    """With several test processes (pytest-xdist), passes the figures of this process to the process that prints them.
    """
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
    """Returns a function. A line that is passed to it is printed below the test results."""
    return pytestconfig.stash[FIGURES].append


@pytest.fixture
def start(tmp_path):
    """Starts a conductor (or a router with name="router") with these arguments. At the end it gets Ctrl-C, and must
    leave no process."""
    start, finish = launcher(tmp_path)
    yield start
    finish()


@pytest.fixture
def spawn(tmp_path):
    """Starts an executable that listens on no address. It is killed at the end."""
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
    """Two workers that serve the shipped model. Tests must leave the cluster unchanged."""
    return shared("--workers", 2)


@pytest.fixture(scope="session")
def bare(shared):
    """Two workers serving a random model without a tokenizer: token ids in and out."""
    return shared("--workers", 2, "--model", GOLDENS / "seed0/qwen3", "--skip-tokenizer-init")
