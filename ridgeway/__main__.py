"""`python -m ridgeway`: the command `ridgeway`, where its script is not on PATH."""

import sys

from ridgeway.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
