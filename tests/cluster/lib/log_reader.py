"""A reader of a process's log that can stop reading."""

import fcntl
import os
import threading


class LogReader:
    """Reads a log from a pipe that is soon full, and copies it to a file on a thread."""

    def __init__(self):
        self.read_end, self.write_end = os.pipe()
        # The smallest pipe of the system: one page.
        fcntl.fcntl(self.write_end, fcntl.F_SETPIPE_SZ, 4096)
        self.reading, self.thread = threading.Event(), None
        self.reading.set()

    def pipe_into(self, file):
        """Begins to copy to a file. Returns the pipe's end for the process."""
        self.thread = threading.Thread(target=self._copy, args=(file,), daemon=True)
        self.thread.start()
        return self.write_end

    def handed_over(self):
        """Closes this process's copy of the end for writing, so that the pipe ends with its processes."""
        os.close(self.write_end)

    def _copy(self, file):
        while self.reading.wait() and (piece := os.read(self.read_end, 1 << 16)):
            file.write(piece)
            file.flush()

    def stop(self):
        """Stops reading, at the latest after the next piece."""
        self.reading.clear()

    def go_on(self):
        self.reading.set()

    def finish(self):
        """Reads the rest, once all processes have ended."""
        self.go_on()
        self.thread.join()
        if self.read_end is not None:
            os.close(self.read_end)
        self.read_end = None
