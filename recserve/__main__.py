"""Runs the command line: `python -m recserve` is the command `recserve`."""

from recserve.cli import main

if __name__ == "__main__":
    main()
