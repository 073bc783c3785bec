"""`elasticflow kubernetes`: trainings in a cluster of Kubernetes."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ef_common.cli import reporting
from ef_common.cli.common import name_for, options_and_script, refusing, say_what_next
from ef_common.core.cluster import SharePolicy
from ef_common.errors import ThreadFailed, UsageError
from ef_common.launch.nnodes import nodes_of

if TYPE_CHECKING:
    from ef_common.kubernetes.api import Api

_DEFAULT_IMAGE = "elasticflow-controller:latest"


@click.group()
def kubernetes() -> None:
    """Train in a cluster of Kubernetes, in the pods for which there is room."""


@contextmanager
def _explaining() -> Iterator[None]:
    """Say how to install what is missing."""
    try:
        yield
    except ImportError as error:
        raise UsageError(
            f"this needs a client of Kubernetes ({error}). Install it with "
            "`pip install 'elasticflow-training[kubernetes]'`"
        ) from None


@contextmanager
def _connected(kubeconfig: str) -> Iterator[Api]:
    with _explaining():
        from ef_common.kubernetes.api import Api

    api = Api(kubeconfig)
    try:
        yield api
    finally:
        api.close()


_kubeconfig = click.option(
    "--kubeconfig", default="", metavar="FILE", help="Says where the cluster is. Default: as for kubectl."
)
_namespace = click.option("--namespace", "-n", default="", help="Default: that of the current context.")
_policy = click.option(
    "--policy",
    type=click.Choice([one.value for one in SharePolicy]),
    default=SharePolicy.FAIR.value,
    show_default=True,
    help="fair: beyond their minimum, jobs get equally many pods. priority: the same, but the jobs of the highest "
    "priority come first. gang: a job gets its maximum or nothing, and the oldest comes first.",
)


@kubernetes.command()
@click.option("--image", default=_DEFAULT_IMAGE, show_default=True, help="Image of the controller.")
@click.option("--namespace", "-n", default="elasticflow", show_default=True, help="Where the controller runs.")
@click.option("--replicas", type=click.IntRange(1), default=2, show_default=True, help="One acts, others take over.")
@click.option("--namespaced", is_flag=True, help="Only for jobs of that namespace, which must exist.")
@_policy
@click.option("--dry-run", is_flag=True, help="Print what would be applied, as YAML for kubectl.")
@click.option(
    "--helm-chart", metavar="DIR", type=click.Path(path_type=Path), help="Write a Helm chart to this folder instead."
)
@_kubeconfig
def install(
    image: str,
    namespace: str,
    replicas: int,
    namespaced: bool,
    policy: str,
    dry_run: bool,
    helm_chart: Path | None,
    kubeconfig: str,
) -> None:
    """Install the resource ElasticJob and its controller: `elasticflow kubernetes install --image=IMAGE`.

    With --dry-run, nothing is changed: `elasticflow kubernetes install --dry-run | kubectl apply -f -` does the same.
    """
    from ef_common.kubernetes.installation import manifests

    with refusing("kubernetes install"):
        if helm_chart is not None:
            with _explaining():
                from ef_common.kubernetes.chart import Values, write
            write(helm_chart, Values(image=image, replicas=replicas, namespaced=namespaced, policy=policy))
            rows = (
                (f"helm install elasticflow {helm_chart} --namespace={namespace} --create-namespace", "install it"),
            )
            say_what_next(f"The chart is in {helm_chart}.", rows)
            return
        things = manifests(image=image, namespace=namespace, replicas=replicas, namespaced=namespaced, policy=policy)
        if dry_run:
            click.echo(_as_yaml(things), nl=False)
            return
        with _connected(kubeconfig) as api:
            from ef_common.kubernetes.applying import apply_all

            for line in apply_all(api, things):
                click.echo(line)


@kubernetes.command()
@click.option("--namespace", "-n", default="", help="Where the lease of the controllers is. Default: the pod's own.")
@click.option("--page", default="127.0.0.1:8080", show_default=True, help="Where /healthz, /readyz and /metrics are.")
@click.option("--namespaced", is_flag=True, help="Look at jobs of that namespace only.")
@click.option("--lease-s", type=click.FloatRange(2.0), default=15.0, show_default=True, help="A lost one is replaced.")
@_policy
@_kubeconfig
def controller(namespace: str, page: str, namespaced: bool, lease_s: float, policy: str, kubeconfig: str) -> None:
    """Run the controller, which starts and deletes the pods of all ElasticJobs.

    Several may run: one of them acts. SIGTERM ends it; jobs go on without it, with the pods that they have.
    """
    from ef_common.protocol.addresses import parse_address

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    with refusing("kubernetes controller"), _connected(kubeconfig) as api:
        from ef_common.kubernetes.controller import Controller
        from ef_common.kubernetes.metrics import Metrics, Page

        where = namespace or api.namespace
        if namespaced:
            api.limit_to(where)
        metrics = Metrics()
        api.observe(metrics.answered)
        acts = Controller(api, namespace=where, metrics=metrics, lease_s=lease_s, policy=SharePolicy(policy))
        host, port = parse_address(page, what="--page")
        server = Page(host, port, metrics=metrics, is_ready=lambda: acts.is_ready)
        server.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: acts.stop())
        click.echo(f"the controller answers at http://{host}:{server.port}/metrics", err=True)
        status = 0
        try:
            acts.run()
        except ThreadFailed as error:
            click.echo(f"elasticflow kubernetes controller: {error}", err=True)
            status = 1
        server.stop()
    sys.stdout.flush()
    os._exit(status)  # watches that wait for the API server would be waited for


@kubernetes.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--workers", metavar="MIN:MAX", default="1:8", show_default=True, help="Worker pods of the training.")
@click.option("--nproc-per-node", "per_pod", default="1", show_default=True, help="Workers of a pod, or `gpu`.")
@click.option("--image", required=True, help="Image of the pods, which has the script.")
@click.option("--name", default="", help="Name of the job. Default: that of the script.")
@click.option("--resource", "resources", multiple=True, metavar="NAME=AMOUNT", help="Of a pod: nvidia.com/gpu=1 …")
@click.option("--env", "environ", multiple=True, metavar="NAME=VALUE", help="A variable of the pods.")
@click.option("--volume", "claims", multiple=True, metavar="CLAIM=PATH", help="A volume that all pods mount there.")
@click.option("--checkpoint", metavar="URL", default="", help="Where checkpoints are, which all pods reach.")
@click.option("--spares", type=click.IntRange(0), default=0, help="Pods beyond MAX, which wait in case one is lost.")
@click.option("--priority-class", default="", help="Priority class of the pods.")
@click.option("--dry-run", is_flag=True, help="Print the job as YAML, and do nothing.")
@_namespace
@_kubeconfig
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF RUN] SCRIPT [ARGUMENTS]...")
def submit(
    workers: str,
    per_pod: str,
    image: str,
    name: str,
    resources: tuple[str, ...],
    environ: tuple[str, ...],
    claims: tuple[str, ...],
    checkpoint: str,
    spares: int,
    priority_class: str,
    dry_run: bool,
    namespace: str,
    kubeconfig: str,
    arguments: tuple[str, ...],
) -> None:
    """Submit a training: `elasticflow kubernetes submit --workers=1:8 --image=IMAGE train.py`.

    The training starts with the pods for which there is room, and grows. SCRIPT is a path in the image. Options of
    `elasticflow run` are accepted before it as --name=value; with --autoscale, the job asks for pods itself.
    """
    from ef_common.kubernetes.resource import MAX_NAME
    from ef_common.kubernetes.submission import Submission, pairs

    with refusing("kubernetes submit"):
        run, command = options_and_script(arguments)
        low, high = nodes_of(workers, option="--workers")
        submission = Submission(
            *(name or name_for(command[0], max_chars=MAX_NAME), namespace, low, high, image, command, per_pod),
            resources=pairs(resources, option="--resource"),
            checkpoint=checkpoint,
            priority_class=priority_class,
            environ=pairs(environ, option="--env"),
            run=run,
            spares=spares,
            claims=pairs(claims, option="--volume"),
        )
        job = submission.job()
        if dry_run:
            if not namespace:
                del job["metadata"]["namespace"]
            click.echo(_as_yaml([job]), nl=False)
            return
        with _connected(kubeconfig) as api:
            from ef_common.kubernetes.kinds import JOBS

            job["metadata"]["namespace"] = namespace or api.namespace
            api.create(JOBS, job)
    where = f" --namespace={namespace}" if namespace else ""
    rows = (
        (f"elasticflow kubernetes status{where} {submission.name}", "how many pods it has, and why"),
        (f"elasticflow kubernetes logs --follow{where} {submission.name}", "what it prints"),
        (f"elasticflow kubernetes scale{where} {submission.name} WORKERS", "no more pods than this"),
        (f"elasticflow kubernetes report{where} {submission.name}", "a page that shows how it goes"),
        (f"kubectl delete elasticjob{where} {submission.name}", "end it"),
    )
    say_what_next(f"ElasticJob {submission.name} starts with {low} to {high} pods.", rows)


@kubernetes.command()
@click.argument("name", default="")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each job.")
@_namespace
@_kubeconfig
def status(name: str, as_json: bool, namespace: str, kubeconfig: str) -> None:
    """Show the job NAME, or all jobs of the namespace."""
    with refusing("kubernetes status"), _connected(kubeconfig) as api:
        from ef_common.kubernetes.kinds import JOBS
        from ef_common.kubernetes.submission import row

        where = namespace or api.namespace
        jobs = [api.get(JOBS, where, name)] if name else api.list(JOBS, where)[0]
        rows = [row(job) for job in jobs]
    if as_json:
        for one in rows:
            click.echo(json.dumps(one))
        return
    if not rows:
        click.echo(f"there are no ElasticJobs in namespace {where}")
    for one in rows:
        why = f": {one['reason']}" if one["reason"] else ""
        pods = f"{one['running']} of {one['wanted']} pods run (at least {one['min']}, at most {one['max']})"
        click.echo(f"{one['name']}  {one['phase']}{why}; {pods}{_progress(one)}")


def _progress(one: dict[str, Any]) -> str:
    """How far a training is, as far as that is known."""
    if not one["training"]:
        return ""
    workers = "1 worker trains" if one["training"] == 1 else f"{one['training']} workers train"
    asked = f", and it asks for {one['asked']} pods" if one["asked"] else ""
    saved = "" if one["checkpoint"] is None else f" (saved: {one['checkpoint']})"
    return f"; {workers}, at step {one['step']}{saved}, {one['samples_per_s'] or 0:g} samples/s{asked}"


@kubernetes.command()
@click.argument("name")
@click.argument("workers", type=click.IntRange(0))
@_namespace
@_kubeconfig
def scale(name: str, workers: int, namespace: str, kubeconfig: str) -> None:
    """Let the job NAME have at most so many worker pods; 0 suspends it.

    The same as `kubectl scale elasticjob/NAME --replicas=WORKERS`.
    """
    with refusing("kubernetes scale"), _connected(kubeconfig) as api:
        from ef_common.kubernetes.kinds import JOBS

        job = api.change(JOBS, namespace or api.namespace, name, {"spec": {"workers": workers}})
    low, high = job["spec"].get("minWorkers", 1), job["spec"]["maxWorkers"]
    if workers == 0:
        click.echo(f"{name} is suspended: its pods save a checkpoint, if there is a place for it, and leave")
    elif not low <= workers <= high:
        click.echo(f"{name} has {low} to {high} pods, so it has at most {max(low, min(high, workers))}")
    else:
        click.echo(f"{name} has at most {workers} pods from now on")


@kubernetes.command()
@click.argument("name")
@click.option("--follow", "-f", is_flag=True, help="Go on until the job has ended.")
@_namespace
@_kubeconfig
def logs(name: str, follow: bool, namespace: str, kubeconfig: str) -> None:
    """Print what the pods of the job NAME have written, each line with the name of its pod."""
    with refusing("kubernetes logs"), _connected(kubeconfig) as api:
        from ef_common.kubernetes.following import lines

        for pod, line in lines(api, namespace or api.namespace, name, follow=follow):
            click.echo(f"{pod}  {line}")


@kubernetes.command()
@click.argument("name")
@click.option(
    "--output", "-o", type=click.Path(path_type=Path, dir_okay=False), help="The file. Default: NAME-report.html."
)
@click.option("--run-dir", default="", metavar="DIR", help="Run directory of the pods. Default: what the job says.")
@reporting.options
@_namespace
@_kubeconfig
def report(
    name: str,
    output: Path | None,
    run_dir: str,
    png: Path | None,
    audits: bool,
    as_json: bool,
    namespace: str,
    kubeconfig: str,
) -> None:
    """Write a report of the job NAME from the event logs of its pods, as `elasticflow report` writes one of a run.

    Pods that are gone have taken their logs with them. If any are missing, that is said, and the job is not audited.
    """
    with refusing("kubernetes report"), _connected(kubeconfig) as api, tempfile.TemporaryDirectory() as folder:
        from ef_common.kubernetes.gathering import gather
        from ef_common.report.timeline import snapshot_of

        where, place = namespace or api.namespace, Path(folder) / "run"
        found = gather(api, where, name, place, run_dir=run_dir)
        for line in found.lines():
            click.echo(line, err=True)
        unaudited = "" if audits else reporting.LEFT_OUT
        if found.missing:
            unaudited = "The job is not audited, as the event logs of some workers are missing."
        snapshot = {**snapshot_of(place, unaudited=unaudited, growing=True), "run": f"{where}/{name}"}
        reporting.write(snapshot, output or Path(f"{name}-report.html"), whole=False, png=png, as_json=as_json)


def _as_yaml(things: list[dict[str, object]]) -> str:
    with _explaining():
        from ef_common.kubernetes.texts import as_yaml

    return as_yaml(things)
