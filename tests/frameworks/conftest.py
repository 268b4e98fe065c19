"""The cluster that all tests of frameworks use, and its address."""

import pytest
from agent_scripts import serve
from launcher import launcher


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("frameworks")
    start, finish = launcher(folder)
    yield serve(folder, start)
    finish()


@pytest.fixture(scope="session")
def url(cluster):
    return f"{cluster.url}/v1"
