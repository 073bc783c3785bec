"""``python -m tests.chaos grid|soak``; see ``make chaos`` and ``make soak``."""

import click

from tests.chaos import grid, soak


@click.group()
def main() -> None:
    """Faults, everywhere."""


main.add_command(grid.grid)
main.add_command(soak.command)

if __name__ == "__main__":
    main()
