"""Runs the command as `python -m ef_common.cli`."""

from ef_common.cli import main

main()
