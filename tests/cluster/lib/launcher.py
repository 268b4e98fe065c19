"""Starts servers, stops all of them, and checks how they end."""

from harness import Server


def launcher(log_dir):
    """Returns two functions: one starts a server, and the other stops all started servers and checks how they exit."""
    started = []

    def start(*args, name="conductor", env=None, ready=True):
        server = Server(name, args, log_dir, env)
        started.append(server)
        return server.wait_until_ready() if ready else server

    def finish():
        problems = []
        for process in reversed(started):
            if process.child.returncode is not None:
                process.destroy()  # the test ended the process, and checked its end
                continue
            try:
                process.stop()
            except AssertionError as problem:
                problems.append(str(problem))
        assert not problems, "\n".join(problems)

    return start, finish
