"""`python -m kvfs.demo`: see kvfs.demo.show."""

import sys

from kvfs.demo.show import main

if __name__ == "__main__":
    sys.exit(main())
