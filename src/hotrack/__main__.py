"""`python -m hotrack` is the `hotrack` command."""

from hotrack.cli.main import main

if __name__ == "__main__":
    main()
