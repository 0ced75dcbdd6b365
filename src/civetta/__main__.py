"""`python -m civetta` is the command line."""

from civetta.cli.main import main

if __name__ == "__main__":
    main()
