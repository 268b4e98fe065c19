"""Planes in shared memory, between the workers of a hand-over, as a fault sees them."""

import os
import pathlib

# Bytes of a segment before its first unit.
HEADER = 4096


def segments(pid):
    """Returns the segments of planes that a worker has open, as paths."""
    found = []
    try:
        for entry in pathlib.Path(f"/proc/{pid}/fd").iterdir():
            try:
                if "memfd:tutti-planes" in os.readlink(entry):
                    found.append(entry)
            except OSError:
                continue  # it was closed
    except OSError:
        pass  # the process has ended
    return found


def identity_of(segment):
    """Identity of a segment, the same at each process that has it open; None if it is gone."""
    try:
        return segment.stat().st_ino
    except OSError:
        return None


def flip(segment, offset):
    """Flips a bit of a segment, if it is still there and `offset` is in its planes. Returns the byte that was there, or
    None."""
    try:
        with segment.open("r+b", buffering=0) as file:
            if HEADER + offset >= os.fstat(file.fileno()).st_size:
                return None
            file.seek(HEADER + offset)
            before = file.read(1)
            file.seek(HEADER + offset)
            file.write(bytes([before[0] ^ 1]))
            return before[0]
    except OSError:
        return None


def written(segment, first, last):
    """True if any byte of this range of a segment's planes is not 0."""
    try:
        with segment.open("rb", buffering=0) as file:
            file.seek(HEADER + first)
            return any(file.read(last - first))
    except OSError:
        return False
