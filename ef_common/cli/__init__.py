"""The command `elasticflow`."""

from ef_common.cli.commands import main

__all__ = ["main"]
