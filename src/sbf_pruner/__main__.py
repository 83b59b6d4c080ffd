"""Entry point of `python -m sbf_pruner`, which runs the `sbf` command."""

import os
import sys

if __name__ == "__main__":
    # Python puts the current directory first on sys.path. Remove it, because it may hold files from someone else
    # that would be imported instead of installed modules.
    if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
        del sys.path[0]

    from .cli import main

    sys.exit(main())
