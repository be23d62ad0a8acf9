"""`python -m kvfs`: the command line, whatever became of the installed scripts.

Scripts named kvctl are shipped by other packages too; this way in cannot be overwritten by them.
"""

from kvfs.cli.main import main

if __name__ == "__main__":
    main()
