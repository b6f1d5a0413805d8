"""``python -m snowskin`` is the ``snowskin`` command."""

from snowskin.cli.app import main

main()
