"""The grid: each fault, in each kind of worker, at each moment of a training; and trainings under constant faults."""
