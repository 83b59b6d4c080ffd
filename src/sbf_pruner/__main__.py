"""`python -m sbf_pruner` is the `sbf` command."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
