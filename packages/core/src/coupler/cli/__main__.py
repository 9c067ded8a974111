"""Run the command line by ``python -m coupler.cli``."""

import sys

from coupler.cli import main

if __name__ == "__main__":
    sys.exit(main())
