"""`python -m sbf_pruner` is the `sbf` command."""

import os
import sys

if __name__ == "__main__":
    # Python puts the current directory first on the path, which may be a folder that somebody else has filled.
    if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
        del sys.path[0]

    from .cli import main

    sys.exit(main())
