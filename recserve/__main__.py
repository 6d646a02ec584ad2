"""`python -m recserve`, the same as the command `recserve`."""

from recserve.cli import main

if __name__ == "__main__":
    main()
