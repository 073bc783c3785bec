"""ElasticFlow: data-parallel training that survives the loss and the arrival of workers.

Glossary
    worker       one training process
    member       a worker that is in the current view
    view         a generation number and the list of members in rank order; everything else is a function of it
    generation   number of a view; generations only grow
    coordinator  the part of a launcher that decides on views; it holds soft state only, and no ordinary step asks it
    standby      a coordinator that an agent keeps ready, in case the active one is lost
    registry     a folder, an object store or etcd through which the agents of a job find each other
    agent        the launcher's process on a node, which starts and supervises workers
    door         address at which an agent listens while it looks for its job, and where others find it
    control connection  that of a worker to the coordinator
    peer connections  those between members that carry a missing result, or the state of a newcomer
    leader request  a question to the coordinator that leads, wherever it is, or an order to it
    resume state  what a worker that comes to another coordinator reports, so that the job goes on from there
    liveness port  port of a worker that is open as long as its process lives
    probe        attempt to connect to a liveness port: a refusal is a sign that the process has ended
    crash record  file in which a worker records its current step, for its agent to read when it has died
    progress tracker  a worker's record of its steps and rests, of which its heartbeats report
    straggler    a member that is slower than the others, so that they wait for it
    boundary     the point between two steps where the view may change as planned
    newcomer     a worker that prepares while the others train, and is admitted at a boundary
    spare        a newcomer that is ready, but for which there is no room (the MAX of `--nnodes=MIN:MAX`)
    survivor     a member that continues after a loss, in the same process
    position     index of a sample in the order of an epoch
    call         the description of a collective operation; it is the same in all members that take part
    shard        a part of a stream that can be opened at an offset, such as a file
    piece        a range of offsets of a shard, whose end may be unknown
    lane         the pieces that a data worker reads, one after the other
    window       the positions that one step deals to all members
    watermark    how far the members have certainly come: what a newcomer may skip in a stream, and what it must keep
    commit       a gradient reduction has completed, so its samples have been used
    global batch  samples of one update, of all members together
    ratio        global batch divided by the reference batch, for which the optimizer's settings were chosen
    run          one start of a job; starts from the same URL are numbered
    checkpoint   files in a store that a manifest vouches for; named by run, generation and step
    snapshot     the copy on the host that becomes a checkpoint while the training continues
    claim        a record in a shared store by which workers agree that they, and no others, continue the training
    fenced       no longer allowed to publish checkpoints, because other workers have continued
    returned     positions that were dealt to a worker which was lost before the commit; they are dealt again
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
