"""The file of API keys that a router reads."""

import hashlib


def line(name, key, *limits):
    return " ".join([name, hashlib.sha256(key.encode()).hexdigest(), *limits]) + "\n"
