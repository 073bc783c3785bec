"""ElasticFlow: training that keeps its processes, its samples and its convergence while its workers change.

Glossary
    worker       one training process
    member       a worker that is in the current view
    view         (generation, members in rank order); everything is a function of it
    generation   number of a view; generations only grow
    coordinator  decides on views; holds soft state only, and no steady step asks it
    boundary     the place between two steps where the view may change by plan
    newcomer     a worker that does its slow work while the others train, and is admitted at a boundary
    survivor     a member that goes on after a loss, in the same process
    position     index of a sample in an epoch's order
    call         what a collective is for, in words that are the same in all members that are in it
    window       the positions that one step deals to all members
    place        how far the members are for sure: what a newcomer may skip in a stream, and what it must keep
    commit       a gradient reduction has completed: its samples are used
    global batch samples of one update, of all members together
    ratio        global batch : reference batch, which the optimizer's settings are meant for
    run          one start of a job; starts from the same URL are numbered
    checkpoint   files in a store that a manifest vouches for; named by (run, generation, step)
    snapshot     what is to become a checkpoint, held still on the host while training goes on
    fenced       not allowed to publish any more, because others have gone on
    returned     positions that were dealt to a worker which died before the commit; dealt again
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("elasticflow")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
