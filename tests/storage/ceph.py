"""A real object store: one monitor, one OSD in memory and one RADOS gateway of Ceph, on this machine alone."""

from __future__ import annotations

import glob
import os
import shutil
import signal
import socket
import subprocess
import time
import uuid
from pathlib import Path

from ef_common.testing.ports import free_ports
from tests.entered import Entered

PROGRAMS = ("ceph", "ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin", "setpriv")
KEYS = {"key": "efaccess", "secret": "efsecretkey"}
_DEADLINE_S = 60.0
_CONFIG = """\
[global]
fsid = {fsid}
mon_host = [v2:127.0.0.1:{mon_v2},v1:127.0.0.1:{mon_v1}]
run_dir = {folder}
admin_socket = {folder}/$name.asok
log_file = {folder}/$name.log
crash_dir = {folder}
osd_crush_chooseleaf_type = 0
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 1
osd_pool_default_pgp_num = 1
mon_allow_pool_size_one = true
mon_warn_on_pool_no_redundancy = false
[client.admin]
keyring = {folder}/admin.keyring
[mon]
mon_data = {folder}/mon
mon_initial_members = a
auth_allow_insecure_global_id_reclaim = true
paxos_propose_interval = 0.02
paxos_min_wait = 0.01
[osd]
osd_data = {folder}/osd
keyring = {folder}/osd/keyring
osd_objectstore = memstore
memstore_device_bytes = {room_bytes}
{class_dir}
[client.rgw.a]
rgw_data = {folder}/rgw
keyring = {folder}/rgw/keyring
rgw_frontends = beast endpoint=127.0.0.1:{rgw} tcp_nodelay=1
rgw_run_sync_thread = false
rgw_enable_usage_log = false
"""


def missing_programs() -> list[str]:
    """What is not installed here."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


class Ceph(Entered):
    """Started by entering it, ended by leaving it; its processes end with this one in any case.

    Args:
        folder: An empty one, with a short path: there are sockets in it.
        room_bytes: Of memory, for what is stored. What was deleted takes room for some time.
    """

    def __init__(self, folder: Path, *, room_bytes: int = 1 << 30) -> None:
        self.folder = folder
        self._room_bytes = room_bytes
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ports = dict(zip(("mon_v2", "mon_v1", "rgw"), free_ports(3), strict=True))

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._ports['rgw']}"

    def stall(self) -> None:
        """From now on nothing that needs the disk is answered."""
        self.processes["osd"].send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.processes["osd"].pid, os.WSTOPPED)  # all of its threads stand still

    def go_on(self) -> None:
        self.processes["osd"].send_signal(signal.SIGCONT)

    def __exit__(self, *_: object) -> None:
        for process in reversed(self.processes.values()):
            process.kill()  # nothing of this is needed any more; SIGKILL ends a stopped one, too
            process.wait()

    def _start(self) -> None:
        for name in ("mon", "osd", "rgw"):
            (self.folder / name).mkdir()
        self._configure()
        self._start_monitor()
        self._start_osd()
        self._run("ceph auth get-or-create client.rgw.a mon 'allow rw' osd 'allow rwx' -o rgw/keyring")
        self._daemon("rgw", "radosgw -n client.rgw.a -f")
        user = f"--uid ef --display-name ef --access-key {KEYS['key']} --secret-key {KEYS['secret']}"
        self._run(f"radosgw-admin -n client.rgw.a user create {user}")
        self._until("the gateway listens", lambda: _listens(self._ports["rgw"]))

    def _configure(self) -> None:
        fsid = uuid.uuid4()
        found = glob.glob("/usr/lib/*/rados-classes")
        class_dir = f"osd_class_dir = {found[0]}" if found else ""
        config = _CONFIG.format(
            fsid=fsid, folder=self.folder, class_dir=class_dir, room_bytes=self._room_bytes, **self._ports
        )
        (self.folder / "ceph.conf").write_text(config)
        addresses = f"[v2:127.0.0.1:{self._ports['mon_v2']},v1:127.0.0.1:{self._ports['mon_v1']}]"
        self._run(f"monmaptool --create --fsid {fsid} --addv a {addresses} monmap")
        caps = "--cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *'"
        self._run(f"ceph-authtool --create-keyring admin.keyring --gen-key -n client.admin {caps}")
        shutil.copy(self.folder / "admin.keyring", self.folder / "mon.keyring")
        self._run("ceph-authtool mon.keyring --gen-key -n mon. --cap mon 'allow *'")

    def _start_monitor(self) -> None:
        self._run("ceph-mon --mkfs -i a --monmap monmap --keyring mon.keyring")
        self._daemon("mon", "ceph-mon -i a -f")
        self._until("the monitor answers", lambda: self._try("timeout 2 ceph -s") is not None)

    def _start_osd(self) -> None:
        disk = uuid.uuid4()
        self._run(f"ceph osd new {disk}")
        self._run(f"ceph-osd -i 0 --no-mon-config --mkfs --osd-uuid {disk} --mkkey")
        self._run("ceph auth add osd.0 osd 'allow *' mon 'allow profile osd' -i osd/keyring")
        self._daemon("osd", "ceph-osd -i 0 -f")
        self._until("the OSD is up", lambda: "1 up" in (self._try("ceph osd stat") or ""))

    def _daemon(self, name: str, command: str) -> None:
        with (self.folder / f"{name}.out").open("wb") as output:
            self.processes[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command.split()],
                cwd=self.folder,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _run(self, command: str) -> str:
        done = subprocess.run(
            ["sh", "-c", command],
            cwd=self.folder,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
        )
        if done.returncode:
            raise RuntimeError(f"{command}: {done.stderr[-2000:]}")
        return done.stdout

    def _try(self, command: str) -> str | None:
        try:
            return self._run(command)
        except RuntimeError:
            return None

    def _until(self, what: str, condition) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while not condition():
            ended = [name for name, process in self.processes.items() if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                output = "".join((self.folder / f"{name}.out").read_text()[-2000:] for name in self.processes)
                raise RuntimeError(f"Waited in vain until {what}; ended: {ended}\n{output}")
            time.sleep(0.05)

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "CEPH_CONF": str(self.folder / "ceph.conf")}


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
