"""How each block of the documentation is run: one row each for Python and for what pages show, one for each command.

A block without a row fails the tests. Rows are found by the page and the heading that a block stands under, and a
number if it is not the first there.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Program:
    """How a block of Python is run. The blocks of a page are run in one process, in its order, and share their names.

    Attributes:
        preamble: A function of `tests.pages.preambles`: the names that the block takes for granted.
        use: A function of `tests.pages.uses` that uses what the block has defined. Strategies and lists of callbacks
            that stand in it as lines of their own are used in any case: a training is made with each.
        workers: More than 1 if it is about several workers: they run it in a job, a job for each block.
        thorough: It takes more than some seconds, and runs in `make test-all`.
    """

    preamble: str
    use: str = ""
    workers: int = 1
    thorough: bool = False


PROGRAMS = {
    "README.md: Lightning": Program("lightning"),
    "README.md: Keras": Program("of_keras"),
    "README.md: Or one `forward`": Program("forward"),
    "README.md: In a notebook": Program("launched", thorough=True),
    "docs/get-started/forward.md: 1. The program": Program("forward"),
    "docs/get-started/keras.md: 2. The program": Program("of_keras"),
    "docs/get-started/lightning.md: 2. The program": Program("lightning"),
    "docs/get-started/notebook.md: In a notebook": Program("notebook", thorough=True),
    "docs/guides/batch-and-learning-rate.md: The learning rate follows the batch": Program("both"),
    "docs/guides/batch-and-learning-rate.md: A fixed global batch": Program("nothing"),
    "docs/guides/batch-and-learning-rate.md: A fixed global batch (2)": Program("nothing"),
    "docs/guides/checkpoints.md: Checkpoints": Program("both"),
    "docs/guides/checkpoints.md: When": Program("nothing"),
    "docs/guides/determinism.md: Determinism": Program("both"),
    "docs/guides/hangs.md: A worker that is slow": Program("both"),
    "docs/guides/keras.md: Without a list of callbacks": Program("both"),
    "docs/guides/keras.md: What works as it is": Program("nothing", use="continue_with_best"),
    "docs/guides/migrate-ddp.md: Lightning's `ddp` strategy": Program("both"),
    "docs/guides/migrate-ddp.md: Lightning's `ddp` strategy (2)": Program("nothing", use="train_with_trainer"),
    "docs/guides/migrate-horovod.md: Keras": Program("of_keras"),
    "docs/guides/migrate-horovod.md: Keras (2)": Program("nothing"),
    "docs/guides/migrate-torchrun.md: Migrate from torchrun elastic (2)": Program("both", use="train_with_trainer"),
    "docs/guides/worker-changes.md: When workers join or leave": Program("both", "lose_a_worker_in_keras", workers=2),
    "docs/guides/worker-changes.md: When workers join or leave (2)": Program(
        "both", "lose_a_worker_in_lightning", workers=2
    ),
}
