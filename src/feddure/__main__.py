"""`python -m feddure`: the command without an installed entry point."""

from feddure.cli import main

if __name__ == "__main__":
    main()
