"""What members of a new view hand on to each other: the result of the newest collective, and the whole state."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from ef_common.core.view import Member, View
from ef_common.errors import ProtocolError
from ef_common.session.ports import Group, Operation, State

TakeIn = Callable[[Callable[[], Any]], Any]
"""Calls what takes in a part of a state that was received, and deals with its errors."""


class Delivery:
    """Sends to other ranks of a view, and receives from them.

    Args:
        group: The group of the view.
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    def send_result(self, operation: Operation | None, view: View, target: int) -> None:
        """Send a result to a rank that is behind.

        Args:
            operation: The newest collective that has completed here.
            view: The view in which it has.
            target: The rank.
        """
        if operation is None:
            raise ProtocolError("asked for a result before any collective has completed")
        meta = {"generation": view.generation, "ids": list(view.ids)}
        self._send_bytes(json.dumps(meta).encode(), target)
        self._send_bytes(operation.describe(), target)
        self._group.send(operation.result(None), target)

    def receive_result(self, operation: Operation | None, source: int) -> tuple[Operation, View]:
        """Receive the result of a collective.

        Args:
            operation: The collective in flight.
            source: A rank that has completed it.

        Returns:
            The collective, and the view in which it has completed.
        """
        if operation is None:
            raise ProtocolError("behind by a collective that is not in flight")
        meta = json.loads(self._receive_bytes(source))
        header = self._receive_bytes(source)
        self._group.receive(operation.result(header), source)
        return operation, View(int(meta["generation"]), tuple(Member(worker, "", "") for worker in meta["ids"]))

    def hand_on_state(self, state: State | None, chain: Sequence[int], rank: int, take_in: TakeIn) -> None:
        """Send the state (the first of a chain), or receive it and pass it on as it arrives (the others).

        Args:
            state: What is sent, or takes in what is received.
            chain: Ranks, in this order.
            rank: This one.
            take_in: How what was received is taken in.
        """
        place = chain.index(rank)
        if place == 0:
            self._send_state(state, chain[1])
        else:
            self._receive_state(state, chain[place - 1], next(iter(chain[place + 1 :]), None), take_in)

    def _send_state(self, state: State | None, target: int) -> None:
        if state is None:
            self._send_bytes(b"", target)
            return
        self._send_bytes(state.describe(), target)
        self._group.send(state.tensors(None), target)

    def _receive_state(self, state: State | None, source: int, target: int | None, take_in: TakeIn) -> None:
        header = self._receive_bytes(source, target)
        if state is not None and header:
            self._group.receive(take_in(lambda: state.tensors(header)), source, target)
            take_in(lambda: state.adopt(header))

    def _send_bytes(self, payload: bytes, target: int) -> None:
        self._group.send([bytearray(len(payload).to_bytes(8, "big"))], target)
        if payload:
            self._group.send([bytearray(payload)], target)

    def _receive_bytes(self, source: int, target: int | None = None) -> bytes:
        size = bytearray(8)
        self._group.receive([size], source, target)
        payload = bytearray(int.from_bytes(size, "big"))
        if payload:
            self._group.receive([payload], source, target)
        return bytes(payload)
