"""Which tests guard which part of the product."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]

STREAMED = ("tests/simulation", "tests/faults/test_streams.py", "tests/faults/test_keras_streams.py")
"""Tests of whole trainings on streams of shards."""

LAUNCHERS = (
    "tests/kubernetes",
    "tests/faults/test_clouds.py",
    "tests/faults/test_coordinator_alone.py",
    "tests/faults/test_every_door.py",
    "tests/faults/test_horovodrun.py",
    "tests/faults/test_hosts.py",
    "tests/faults/test_mpi.py",
    "tests/faults/test_slurm.py",
)
"""Tests with launchers and schedulers of others, and of all ways in which nodes find each other."""

GUARDS: dict[str, tuple[str, ...]] = {
    "docs": ("tests/test_docs.py", "tests/pages"),
    "ef_common/audit": ("tests/test_audit.py", "tests/fuzz"),
    "ef_common/collectives": ("tests/collectives", "tests/faults/test_kill.py", "tests/faults/test_join.py"),
    "ef_common/collectives/gradients": (
        "tests/collectives",
        "tests/simulation",
        "tests/faults/test_kill.py",
        "tests/faults/test_join.py",
    ),
    "ef_common/control": ("tests/control", "tests/faults/test_failover.py", "tests/faults/test_partition.py"),
    "ef_common/core": ("tests/core", "tests/simulation", "tests/faults/test_kill.py", "tests/faults/test_drain.py"),
    "ef_common/data": (
        *("tests/test_dealer.py", "tests/test_workers.py", "tests/test_checkpointer.py", "tests/test_claiming.py"),
        *("tests/storage/test_sharing.py", "tests/faults/test_sharing.py"),
        *("tests/faults/test_validation.py", "tests/faults/test_checkpoints.py", "tests/lightning"),
    ),
    "ef_common/data/adapters": ("tests/adapters", "tests/lightning/test_adapted.py"),
    "ef_common/data/births.py": ("tests/lightning/test_data_workers.py", "tests/lightning/test_torch_walk.py"),
    "ef_common/data/orders.py": ("tests/test_orders.py", "tests/keras/test_shuffling.py"),
    "ef_common/data/read_ahead.py": ("tests/test_read_ahead.py", "tests/keras/test_shuffling.py"),
    "ef_common/data/torch_loader.py": ("tests/lightning/test_data_workers.py", "tests/keras/test_loader.py"),
    "ef_common/data/torch_processes.py": ("tests/lightning/test_data_workers.py", "tests/lightning/test_torch_walk.py"),
    "ef_common/data/torch_walk.py": ("tests/lightning/test_torch_walk.py", "tests/lightning/test_walked.py"),
    "ef_common/data/walked_stream.py": ("tests/test_walking.py", "tests/lightning/test_walked.py", "tests/keras"),
    "ef_common/data/walking.py": ("tests/test_walking.py", "tests/lightning/test_walked.py", "tests/keras"),
    "ef_common/data/torch_order.py": ("tests/lightning/test_order.py", "tests/keras/test_loader.py"),
    "ef_common/data/lane_ahead.py": ("tests/test_lane_ahead.py", "tests/keras/test_stream_data.py"),
    "ef_common/data/ordered_stream.py": ("tests/test_streams.py", "tests/keras/test_stream_data.py"),
    "ef_common/data/bad_shards.py": ("tests/keras/test_stream_evaluation.py", "tests/faults/test_streams.py"),
    "ef_common/data/indexed_stream.py": ("tests/test_streams.py", "tests/keras/test_numbered_source.py", *STREAMED),
    "ef_common/data/lane_reader.py": ("tests/test_streams.py", "tests/test_lane_ahead.py"),
    "ef_common/data/shard_list.py": ("tests/test_streams.py", "tests/test_shard_list.py"),
    "ef_common/data/shards.py": ("tests/test_streams.py", "tests/adapters"),
    "ef_common/data/shuffle_buffer.py": ("tests/test_streams.py",),
    "ef_common/data/stream_coverage.py": (
        *("tests/test_stream_coverage.py", "tests/keras/test_stream_evaluation.py"),
        *("tests/faults/test_streams.py", "tests/faults/test_keras_streams.py"),
    ),
    "ef_common/data/stream_dealer.py": ("tests/test_stream_dealer.py", *STREAMED),
    "ef_common/data/stream_epochs.py": ("tests/keras/test_stream_data.py", *STREAMED),
    "ef_common/data/stream_turns.py": ("tests/test_stream_turns.py", *STREAMED),
    "ef_common/data/torch_indexed.py": ("tests/test_streams.py", "tests/faults/test_streams.py"),
    "ef_common/data/torch_lanes.py": ("tests/test_streams.py", "tests/faults/test_streams.py"),
    "ef_common/data/torch_stream.py": ("tests/test_streams.py", "tests/faults/test_streams.py"),
    "ef_common/demo": ("tests/demo",),
    "ef_common/horovod": ("tests/horovod", "tests/collectives", "tests/faults/test_horovodrun.py"),
    "ef_common/core/cluster": (
        *("tests/core/test_cluster.py", "tests/core/test_cluster_report.py", "tests/core/test_arrivals.py"),
        *("tests/core/test_cluster_losses.py", "tests/core/test_cluster_ends.py", "tests/core/test_cluster_faults.py"),
        "tests/core/test_cluster_contacts.py",
        "tests/kubernetes",
    ),
    "ef_common/kubernetes": ("tests/kubernetes",),
    "ef_common/cli/kubernetes.py": ("tests/kubernetes", "tests/cli"),
    "ef_common/launch/kubeflow.py": ("tests/launch", "tests/kubernetes/kubeflow"),
    "ef_common/launch/tf_config.py": ("tests/launch", "tests/kubernetes/kubeflow"),
    "ef_common/launch": (
        "tests/launch",
        "tests/faults/test_departures.py",
        "tests/faults/test_doors.py",
        "tests/faults/test_plain_torchrun.py",
        "tests/faults/test_torchrun_siblings.py",
        *(place for place in LAUNCHERS if place != "tests/kubernetes"),
        "tests/kubernetes/kubeflow",
    ),
    "ef_common/parts.py": ("tests/test_parts.py", "tests/lightning/test_hooks.py", "tests/keras/test_hooks.py"),
    "ef_common/protocol": ("tests/protocol", "tests/control", "tests/simulation", "tests/faults/test_failover.py"),
    "ef_common/program": ("tests/program", "tests/faults/test_program.py"),
    "ef_common/cli": ("tests/cli",),
    "ef_common/report": ("tests/report",),
    "ef_common/session": ("tests/session", "tests/control", "tests/simulation", "tests/faults"),
    "ef_common/storage": ("tests/storage", "tests/faults/test_sharing.py", "tests/faults/test_restart.py"),
    "ef_common/testing": ("tests/simulation", "tests/faults/test_kill.py"),
    "ef_common": ("tests/faults", "tests/control", "tests/simulation"),
    "ef_keras": (
        "tests/keras",
        "tests/faults/test_keras.py",
        "tests/faults/test_keras_streams.py",
        "tests/faults/test_kill.py",
    ),
    "ef_lightning": ("tests/lightning", "tests/faults/test_deterministic.py", "tests/faults/test_restart.py"),
    "ef_lightning/stream_evaluation.py": ("tests/faults/test_streams.py",),
    "ef_lightning/stream_loader.py": ("tests/lightning/test_stream_loader.py", "tests/faults/test_streams.py"),
    "ef_keras/demo.py": ("tests/demo",),
    "ef_lightning/demo.py": ("tests/demo",),
    "elasticflow": ("tests/test_elasticflow.py", "tests/program"),
    "examples": ("tests/examples", "tests/pages"),
    "pyproject.toml": ("tests/cli/test_doctor.py", "tests/lightning/test_hooks.py", "tests/keras/test_hooks.py"),
}
"""Of two entries that fit a file the longer one counts. A file of the tests guards itself."""


def is_of_launchers(file: str) -> bool:
    """Whether a test, as a path from the root of the project, is one of launchers."""
    return file in LAUNCHERS or any(str(folder) in LAUNCHERS for folder in Path(file).parents)


def guards_of(changed: Iterable[str]) -> list[str]:
    """Tests, as paths, that guard these files (paths from the root of the project), without repetitions."""
    found: dict[str, None] = {}
    for file in changed:
        for place in _guards_of_one(file):
            found[place] = None
    return [place for place in found if not any(other in found for other in map(str, Path(place).parents))]


def _guards_of_one(file: str) -> tuple[str, ...]:
    path = Path(file)
    if path.parts[0] == "tests":
        return (file,) if path.name.startswith("test_") else ()
    fitting = [place for place in GUARDS if place == file or Path(place) in path.parents]
    return GUARDS[max(fitting, key=len)] if fitting else ()


def paths_of(part: str) -> list[str]:
    """What `PART=` names: a folder or a file of the tests ("keras", "faults/test_kill.py"), or of the product.

    Raises:
        ValueError: There is no such part.
    """
    for path in (f"tests/{part}", part if part.startswith("tests") else ""):
        if path and (ROOT / path).exists():
            return [path.rstrip("/")]
    if found := guards_of([part.rstrip("/")]):
        return found
    folders = sorted(path.name for path in (ROOT / "tests").iterdir() if any(path.glob("test_*.py")))
    raise ValueError(f"there are no tests of {part!r}. Parts: {', '.join(folders)}; or a path, as ef_common/storage")
