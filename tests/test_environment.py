from __future__ import annotations

from tests.environment import clean


def test_clean_environment_keeps_where_things_are_and_drops_what_a_scheduler_has_set() -> None:
    kept = {"HOME": "/root", "PATH": "/bin", "PIP_INDEX_URL": "x", "CUDA_VISIBLE_DEVICES": "0"}
    dropped = ("SLURM_JOB_ID", "OMPI_COMM_WORLD_RANK", "PET_NNODES", "RANK", "TF_CONFIG", "KERAS_BACKEND", "http_proxy")
    environ = {**kept, **dict.fromkeys(dropped, "1"), "OMP_NUM_THREADS": "16"}
    clean(environ)
    assert {name: environ[name] for name in kept} == kept
    assert environ["OMP_NUM_THREADS"] == "1"
    assert not environ.keys() & set(dropped)
