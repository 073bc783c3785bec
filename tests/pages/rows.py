"""How each block of the documentation is run: one row each for Python and for what pages show, one for each command.

A block without a row fails the tests. Rows are found by the page and the heading that a block stands under, and a
number if it is not the first there. Docstrings with `Example::` are pages, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Program:
    """How a block of Python is run. The blocks of a page are run in one process, in its order, and share their names.

    Attributes:
        preamble: A function of `tests.pages.preambles`: the names that the block takes for granted.
        use: A function of `tests.pages.uses` that uses what the block has defined. Strategies and lists of callbacks
            that stand in it as lines of their own are used in any case: a training is made with each.
        workers: 2 if it is about several workers: they run it in a job, and one of them is lost.
        thorough: It takes more than some seconds, and runs in `make test-all`.
        horovod: It needs a Horovod that is built.
        streams: It needs the libraries of the extra `streams`.
    """

    preamble: str
    use: str = ""
    workers: int = 1
    thorough: bool = False
    horovod: bool = False
    streams: bool = False


PROGRAMS = {
    "docs/guides/streams.md: A stream of your own": Program("nothing"),
    "docs/guides/streams.md: Keras": Program("files_of_arrays"),
    "docs/guides/streams.md: A pipeline of TensorFlow": Program("files_of_records"),
    "docs/guides/streams-sources.md: Streams without shards": Program("rows_of_csv"),
    "docs/guides/streams-sources.md: What is recognized": Program("files_of_samples", streams=True),
    "docs/guides/streams-sources.md: What is recognized (2)": Program("files_of_samples", streams=True),
    "README.md: Lightning": Program("lightning"),
    "README.md: Keras": Program("of_keras"),
    "README.md: Or one `forward`": Program("forward"),
    "README.md: In a notebook": Program("launched", thorough=True),
    "docs/get-started/forward.md: 1. The program": Program("forward"),
    "docs/get-started/keras.md: 2. The program": Program("of_keras"),
    "docs/get-started/lightning.md: 2. The program": Program("lightning"),
    "docs/get-started/notebook.md: In a notebook": Program("notebook", thorough=True),
    "docs/guides/autoscaling.md: A job that chooses its size (2)": Program("both"),
    "docs/guides/autoscaling.md: Policies": Program("both"),
    "docs/guides/autoscaling.md: The batch": Program("both"),
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
    "docs/guides/migrate-horovod.md: Keras": Program("of_keras", horovod=True),
    "docs/guides/migrate-horovod.md: Keras (2)": Program("of_keras"),
    "docs/guides/migrate-torchrun.md: Migrate from torchrun elastic (2)": Program("both", use="train_with_trainer"),
    "docs/guides/worker-changes.md: When workers join or leave": Program("both", "lose_a_worker_in_keras", workers=2),
    "docs/guides/worker-changes.md: When workers join or leave (2)": Program(
        "both", "lose_a_worker_in_lightning", workers=2
    ),
    "ef_keras/callbacks.py: Example": Program("both"),
    "ef_keras/dataset.py: Example": Program("files"),
    "ef_keras/program.py: Example": Program("regression"),
    "ef_keras/public.py: Example": Program("both"),
    "ef_lightning/program.py: Example": Program("by_hand"),
}

# ---------------------------------------------------------------- commands

FOLLOWED = {
    r"(KERAS_BACKEND=torch )?(elasticflow run|torchrun) .*": "start",
    r"KERAS_BACKEND=torch python \S+": "call",
    r"kill -KILL PID": "kill",
    r"elasticflow scale \d+": "scale",
    r"elasticflow stop": "stop",
    r"elasticflow audit \S+": "audit",
    r"export .*": "export",
    r"elasticflow (status|report|list|doctor)( (?!--serve)\S+)*": "call",
    r'eval "\$\(elasticflow completion bash\)"': "call",
}
"""Commands that a test gives as they stand, page by page, and by which method of `tests.pages.walk.Walk`."""

ELSEWHERE = {
    r"elasticflow demo( --framework=keras)?": "tests/demo/test_play.py",
    r"python examples/0[1256]-[\w-]+/train\.py": "tests/examples/test_digits.py",
    r"elasticflow run --nproc-per-node=2 examples/(0[78]|12)-[\w-]+/train\.py": "tests/examples/test_run.py",
    r"python examples/04-convergence/experiment\.py --(short|report)": "tests/examples/test_convergence.py",
    r"jupyter lab examples/10-notebook/elastic\.ipynb": "tests/examples/test_notebook.py",
    r"horovodrun -np 2( --min-np 1 --max-np 8 --host-discovery-script \./discover\.sh)? python train\.py": (
        "tests/faults/test_horovodrun.py"
    ),
    r"elasticflow coordinator --rdzv-endpoint=HOST:29400": "tests/faults/test_coordinator_alone.py",
    r"elasticflow run .*--autoscale=.* train\.py": "tests/faults/test_autoscale.py",
    r"elasticflow slurm (submit|srun) .*|scancel .*|scontrol .*|sbatch .*": "tests/faults/test_slurm.py",
    r"(printf .* > hosts\.txt|elasticflow run --(hosts|host-discovery-script)=.*)": "tests/faults/test_hosts.py",
    r"elasticflow mpi .*": "tests/faults/test_mpi.py",
    r"elasticflow yarn .*": "tests/launch/test_yarn.py",
    r"elasticflow status elasticflow-runs/train-…": "tests/faults/test_slurm.py",
    r"elasticflow kubernetes .*|kubectl .*|cd examples/15-kubernetes": "tests/kubernetes/test_cluster.py",
    r"helm .*": "tests/kubernetes/test_chart.py",
    r"elasticflow run --join=elasticflow-runs/train-…": "tests/launch/test_run.py",
    r"torchrun .* --rdzv-endpoint=node-1:29400,node-2:29400,node-3:29400 .*": "tests/faults/test_doors.py",
    r"elasticflow status (runs/1 )?--serve( --address 0\.0\.0\.0:8642)?": "tests/report/test_serve.py",
}
"""Commands that the tests of this file give."""

NOT_RUN = {
    r"yarn app .*": "it needs a cluster of Hadoop",
    r"pip install .*|python -m venv \.venv|\. \.venv/bin/activate|elasticflow horovod build": "it installs something",
    r"podman build .*": "it downloads images",
    r"\(umask 077; openssl rand .*\)": "it makes a secret, and the tests have one",
    r"python examples/04-convergence/experiment\.py( --sweep)?": "it takes half an hour",
}
"""Commands of which `tests/test_docs.py` alone knows that they and their options exist, and why."""


def followed(command: str) -> str:
    """By which method a command is followed; "" if it is not."""
    if any(re.fullmatch(pattern, command) for pattern in (*ELSEWHERE, *NOT_RUN)):
        return ""
    return next((step for pattern, step in FOLLOWED.items() if re.fullmatch(pattern, command)), "")


def known(command: str) -> bool:
    """Whether there is a row for it."""
    return any(re.fullmatch(pattern, command) for pattern in (*FOLLOWED, *ELSEWHERE, *NOT_RUN))


AN_EPOCH = "# until an epoch has ended"
_ON_THIS_MACHINE = ["sh -c 'echo localhost > hosts.txt; exec elasticflow run --hosts=hosts.txt train.py'"]
GIVEN = {
    "docs/guides/ssh-hosts.md": _ON_THIS_MACHINE,
    "examples/12-ssh-hosts/README.md": _ON_THIS_MACHINE,
    "docs/get-started/notebook.md": ["python notebook.py"],
    "docs/guides/monitoring.md": [
        "ELASTICFLOW_AUDIT=1 SAMPLES=2000 elasticflow run --nproc-per-node=2 --checkpoint=build/digits train.py",
        "kill -KILL PID",
        AN_EPOCH,
        "elasticflow audit elasticflow-runs/train-…",
    ],
}
"""What a reader has done before the first command of a page: `notebook.py` is the program of that page."""

# ---------------------------------------------------------------- what pages show

OF_THE_PAGE = "of the page"
"""The commands of the page itself print it."""

SHOWN = {
    "README.md: What is promised, and how to check it": "docs/guides/monitoring.md",
    "docs/concepts/index.md: Concepts": "a drawing",
    "docs/architecture.md: The control plane without I/O": "tests/test_diagrams.py",
    "docs/architecture.md: 4. The session's rules": "tests/test_diagrams.py",
    "docs/architecture.md: 4. The session's rules (2)": "tests/test_diagrams.py",
    "docs/architecture.md: 4. The session's rules (3)": "tests/test_diagrams.py",
    "docs/architecture.md: 4. The session's rules (4)": "tests/test_diagrams.py",
    "docs/architecture.md: 4. The session's rules (5)": "tests/test_diagrams.py",
    "docs/architecture.md: 10. Trust": "tests/test_diagrams.py",
    "docs/architecture.md: 5. The membership machine's rules": "tests/test_diagrams.py",
    "docs/architecture.md: 5. The membership machine's rules (2)": "tests/test_diagrams.py",
    "docs/architecture.md: How an agent finds its job": "tests/test_diagrams.py",
    "docs/architecture.md: How an agent finds its job (2)": "tests/test_diagrams.py",
    "docs/architecture.md: In a cluster of Kubernetes": "tests/test_diagrams.py",
    "docs/architecture.md: On hosts that ssh reaches": "tests/test_diagrams.py",
    "docs/architecture.md: Stragglers": "tests/test_diagrams.py",
    "docs/architecture.md: The control plane without I/O (2)": "tests/test_diagrams.py",
    "docs/architecture.md: The control plane without I/O (3)": "tests/test_diagrams.py",
    "docs/architecture.md: The control plane without I/O (4)": "tests/test_diagrams.py",
    "docs/architecture.md: Under horovodrun": "tests/test_diagrams.py",
    "docs/get-started/demo.md: One command (2)": "tests/demo/test_play.py",
    "docs/get-started/keras.md: 3. Two workers (3)": OF_THE_PAGE,
    "docs/get-started/keras.md: 5. Check (2)": OF_THE_PAGE,
    "docs/get-started/lightning.md: 3. Two workers (3)": OF_THE_PAGE,
    "docs/get-started/lightning.md: 5. Check (2)": OF_THE_PAGE,
    "docs/guides/kubernetes.md: A job that chooses its size": "tests/kubernetes/test_commands.py",
    "docs/guides/kubernetes.md: How far it is": "tests/kubernetes/test_commands.py",
    "docs/guides/launching.md: SkyPilot and SageMaker": "tests/faults/test_clouds.py",
    "docs/guides/monitoring.md: The terminal": OF_THE_PAGE,
    "docs/guides/streams-sources.md: The stream must be the same in all workers": "tests/lightning/test_walked.py",
    "docs/guides/monitoring.md: The terminal (2)": "tests/pages/test_programs.py",
    "docs/guides/monitoring.md: The audit (2)": OF_THE_PAGE,
    "docs/guides/monitoring.md: Metrics": "tests/pages/test_commands.py",
    "examples/03-kill-and-join/README.md: Kill and join (2)": "tests/demo/test_play.py",
    "examples/07-text/README.md: A text model in one `forward` (2)": "tests/examples/test_run.py",
    "examples/08-own-module/README.md: A LightningModule with everything that projects attach to it (2)": (
        "tests/examples/test_run.py"
    ),
    "examples/09-by-hand/README.md: Kill and join by hand (5)": "tests/examples/test_run.py",
    "examples/16-streams/README.md: A stream of files (2)": "tests/examples/test_run.py",
}
"""What prints a block of output: commands of its page or of another one, or a test; or why nothing does."""
