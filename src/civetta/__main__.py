"""The command line, from `python -m civetta` and from the installed command.

Nothing is imported before Ctrl+C can be taken: importing the command line takes a while itself.
"""


def main() -> None:
    """Run the command line of this process and exit with its status."""
    try:
        from civetta.cli.main import main as run

        run()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
