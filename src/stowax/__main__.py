"""`python -m stowax` is the `stowax` command."""

from ._cli._cli import main

if __name__ == "__main__":
    main()
