"""The GPUs of this machine, real or emulated."""

import ctypes
import os


def has_driver():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def has_gpus(count):
    """True if each of `count` workers can have a separate GPU. Emulated GPUs are always enough, because a test chooses
    their number."""
    if "EMULATED_GPUS" in os.environ:
        return True
    driver, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(found)) == 0 and found.value >= count
