"""Runs one attack on a cluster, with real sockets from a separate address, and prints its outcomes as JSON. The attacks
are in the modules that are imported here.
"""

import argparse
import asyncio
import json
import resource
import sys

import hostile_http
import hostile_http2
import hostile_inside
import hostile_media
from hostile_sockets import ATTACKS, Target

__all__ = ["ATTACKS", "hostile_http", "hostile_http2", "hostile_inside", "hostile_media"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("attack", choices=list(ATTACKS))
    parser.add_argument("--http", type=int, required=True)
    parser.add_argument("--grpc", type=int, required=True)
    parser.add_argument("--cluster", type=int, default=0)
    parser.add_argument("--planes", type=int, default=0)
    parser.add_argument("--model", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--size", type=float, default=1)
    options = vars(parser.parse_args())
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    chosen = ATTACKS[options.pop("attack")]
    json.dump(asyncio.run(chosen.run(Target(**options))), sys.stdout)


if __name__ == "__main__":
    main()
