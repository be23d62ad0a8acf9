"""`python -m kvfs.cli`: the same command line as `kvctl`."""

from kvfs.cli.main import main

if __name__ == "__main__":
    main()
