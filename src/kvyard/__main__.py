"""``python -m kvyard`` is the ``kvyard`` command."""

from kvyard.cli.app import main

if __name__ == "__main__":
    main()
