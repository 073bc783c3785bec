"""Gradient reduction in buckets, which overlaps the backward pass and can be run again after a loss.

The local gradient of a parameter stays in `param.grad` until the reduction has completed; buckets hold scaled
copies of it, which are summed in place. So a reduction that a loss interrupts is run again from the local
gradients with the weights of the members that are left, without another forward or backward.

A completed result must stay intact until every member has it (it may have to be handed on). The buckets of a
small module have two buffers in turn: whoever begins the next reduction but one has completed the next one, which
every member has begun. A larger module is spared the memory: a barrier follows its reduction, and `param.grad`
becomes a view of the bucket, without a copy. Its own memory is let go of when the next backward pass is about to
want it: earlier, the allocator would hand it back to the system, and get it again page by page.

The last bucket ends with flags, each summed over the members: "I know of a pending change", "a gradient was
accumulated twice, so the overlapped copy is stale", "I had no backward pass in this step", "I want to stop", "so much
of my weight is lacking, as my batch is smaller than a full one" (all then divide by what is there), and one per
parameter, "it has a gradient here".
"""
