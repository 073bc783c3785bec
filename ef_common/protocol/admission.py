"""Which workers a coordinator admits."""

from __future__ import annotations

from collections.abc import Iterable, Set

from ef_common.core.membership import Gathering, Membership
from ef_common.protocol import wire
from ef_common.protocol.auth import Token, coordinator_proof, proves, worker_proof
from ef_common.protocol.peer import PeerRefusal


class Admission:
    """Admits whoever knows the job token, and is the one that came under its name before.

    ::

        unknown → known   `remember`: by its key
        known → unknown   `forget`, unless it may come back
    """

    def __init__(self, token: Token | None) -> None:
        self._tokens = (None,) if token is None else token.accepted
        self._keys: dict[str, str] = {}  # of those that are connected, or members that may come back

    @property
    def known(self) -> Set[str]:
        """Ids of the workers whose keys are known."""
        return self._keys.keys()

    def prove(self, nonce: str, hello: wire.Hello) -> str:
        """Our proof for a worker that has answered our challenge, which had this nonce.

        Raises:
            PeerRefusal: It does not know the token, or it has the name of another worker.
        """
        nonces = {"server_nonce": nonce, "client_nonce": hello.nonce}
        for token in self._tokens:
            if proves(worker_proof(token, **nonces, key=hello.key, member=hello.member), hello.proof):
                break
        else:
            raise PeerRefusal("wrong token", self._explain(), code="authentication")
        if not proves(self._keys.get(hello.member.id, hello.key), hello.key):
            raise PeerRefusal("name of another", f"worker {hello.member.id} is somebody else")
        return coordinator_proof(token, **nonces)

    def remember(self, worker: str, key: str) -> None:
        """From now on, only the one with this key comes under this name."""
        self._keys[worker] = key

    def forget(self, workers: Iterable[str], state: Membership) -> None:
        """Forget workers that are not connected, except members that may come back."""
        for worker in workers:
            returned = isinstance(state, Gathering) and worker in state.returned
            if not returned and all(link.view.rank_of(worker) is None for link in state.chain):
                self._keys.pop(worker, None)

    def _explain(self) -> str:
        ours = "has no job token" if self._tokens == (None,) else "has a job token"
        return (
            f"the coordinator {ours}, and the worker's differs or is missing. "
            "Set the same ELASTICFLOW_TOKEN (or token_file) everywhere, or nowhere."
        )
