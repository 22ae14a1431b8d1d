"""`python -m pagewire`: the command line."""

import sys

from pagewire.cli import main

if __name__ == "__main__":
    sys.exit(main())
