"""The options of the router's allocator are those of runtime/executable/allocator.rs."""

import os
import subprocess

from harness import BINARIES


def test_options_are_in_force():
    # Without the symbol from which jemalloc reads them, it would silently keep its own, and memory would not come back.
    env = {**os.environ, "_RJEM_MALLOC_CONF": "stats_print:true"}
    ended = subprocess.run([BINARIES / "router", "--help"], env=env, capture_output=True, text=True, check=True)
    for option in ("tcache: false", "background_thread: true", "dirty_decay_ms: 1000", "muzzy_decay_ms: 0"):
        assert f"opt.{option}" in ended.stderr, option
