"""Real control groups that limit memory. Needs root, and a hierarchy with the controller of memory that is writable."""

import contextlib
import os
import pathlib
import time
import uuid

V1, V2 = pathlib.Path("/sys/fs/cgroup/memory"), pathlib.Path("/sys/fs/cgroup")


class ControlGroup:
    """A control group at the root of its hierarchy."""

    def __init__(self, limit):
        """Raises OSError where this machine gives no such group."""
        self.is_v1 = (V1 / "memory.limit_in_bytes").exists()
        self.path = (V1 if self.is_v1 else V2) / f"tutti-test-{uuid.uuid4().hex[:8]}"
        self.path.mkdir()
        try:
            (self.path / ("memory.limit_in_bytes" if self.is_v1 else "memory.max")).write_text(str(limit))
            # With swap, a process would become slow instead of being killed.
            swap = self.path / ("memory.swappiness" if self.is_v1 else "memory.swap.max")
            if swap.exists():
                swap.write_text("0")
        except OSError:
            self.path.rmdir()
            raise

    def nested(self):
        """Adds a group without a limit of its own inside this one, and returns its path."""
        inner = self.path / "inner"
        inner.mkdir()
        return inner

    @staticmethod
    def command(path):
        """A command that runs another one in the group at this path."""
        return ["sh", "-c", f'echo $$ > {path}/cgroup.procs && exec "$@"', "sh"]

    def remove(self):
        """Removes the group, whose processes have ended. The kernel may take a moment to notice that."""
        for path in sorted(self.path.rglob("*/"), reverse=True) + [self.path]:
            deadline = time.monotonic() + 30
            while path.exists():
                with contextlib.suppress(OSError):
                    path.rmdir()
                    break
                assert time.monotonic() < deadline, f"{path} still has processes"
                time.sleep(0.02)


def missing():
    """The reason why this machine has no such groups; None if it has."""
    if os.geteuid() != 0:
        return "needs root"
    try:
        ControlGroup(1 << 30).remove()
    except OSError as error:
        return f"no control group with a limit of memory can be made: {error}"
    return None
