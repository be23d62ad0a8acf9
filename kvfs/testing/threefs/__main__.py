"""Runs a stand-in in the foreground: see the package."""

from __future__ import annotations

import argparse
import resource

from kvfs.testing.threefs.daemon import Daemon


def main() -> None:
    parser = argparse.ArgumentParser(description="A local directory as a 3FS mount, for tests.")
    parser.add_argument("backing")
    parser.add_argument("point")
    parser.add_argument("--chunk", type=int, default=1 << 20, help="bytes")
    parser.add_argument("--names", type=float, default=30.0, help="seconds names are believed")
    parser.add_argument("--seconds", type=float, default=30.0, help="as long attributes are")
    parser.add_argument("--workers", type=int, default=4)
    # What the kernel knows of, it holds open.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    Daemon(**vars(parser.parse_args())).run()


if __name__ == "__main__":
    main()
