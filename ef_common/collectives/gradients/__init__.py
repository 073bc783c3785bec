"""Gradient reduction in buckets, which overlaps the backward pass and can be run again after a loss.

The local gradient of a parameter stays in `param.grad` until the reduction has completed. Buckets hold scaled copies,
which are summed in place. After a loss the reduction is therefore run again from the local gradients, with the weights
of the survivors and without another forward or backward pass.

A completed result must stay intact until every member has it, because it may have to be handed on. The buckets of a
small module have two alternating buffers: a worker that begins the next reduction but one has completed the next one,
which every member has begun. A larger module is spared that memory: a barrier follows its reduction, and `param.grad`
becomes a view of the bucket, without a copy. Its own memory is released only when the next backward pass is about to
need it: earlier, the allocator would return it to the system, and get it back page by page.

The last bucket ends with flags, each summed over the members: "I know of a pending change", "a gradient was accumulated
twice, so the overlapped copy is stale", "I had no backward pass in this step", "I want to stop", "I wish for a shared
checkpoint", "this much of my weight is missing, because my batch is smaller than a full one" (all then divide by what
is there), the squared norm of the local gradient and a batch that rank 0 asks for, in updates in which the noise is
measured, and one per parameter, "it has a gradient here".
"""
