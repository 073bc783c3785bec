"""The table of our threads in docs/architecture.md is complete, and each of them has tests in which it fails."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("ef_common", "ef_keras", "ef_lightning", "elasticflow")
NOT_OURS = ("threading.Thread", "threading.Timer", "_thread.start_new_thread")
"""What starts a thread whose failure nobody is told of."""
OURS = "ef_common/threads.py"
UNWATCHED = {OURS, "ef_common/data/read_ahead.py", "ef_common/launch/notices.py"}
"""Where that is used: the module that watches over the others, and two that end their process in any case."""

CONTROL = "tests/control/test_failed_threads.py::"
KUBERNETES = "tests/kubernetes/test_failed_threads.py::"
NOTICES = "tests/launch/test_notices.py::"
HOSTS = "tests/launch/hosts/"
WITNESSES = {
    "elasticflow-reader": [
        CONTROL + "test_reader_that_fails_tells_the_main_thread_and_ends_the_line",
        CONTROL + "test_failure_of_the_reader_in_a_call_that_another_thread_does_for_it_ends_the_line",
    ],
    "elasticflow-downlink": [
        CONTROL + "test_reader_of_the_downlink_that_fails_tells_the_main_thread_and_ends_the_line",
        CONTROL + "test_worker_that_can_have_no_more_threads_does_without_a_downlink",
    ],
    "elasticflow-heartbeat": [CONTROL + "test_heartbeats_that_fail_tell_the_main_thread_and_end_the_line"],
    "elasticflow-watchdog": [
        "tests/launch/test_hung.py::test_process_ends_whatever_keeps_it_from_telling_where",
        CONTROL + "test_worker_that_hangs_is_ended_even_if_there_can_be_no_more_threads",
    ],
    "elasticflow-coordinator": [
        CONTROL + "test_coordinator_whose_loop_ends_tells_its_workers_and_its_host",
        CONTROL + "test_decision_that_cannot_be_told_is_waited_for_by_nobody",
        "tests/launch/test_coordinator_alone.py::test_coordinator_whose_thread_has_failed_ends_with_an_error",
    ],
    "elasticflow-announcer": [
        CONTROL + "test_announcer_that_cannot_look_looks_again",
        CONTROL + "test_announcer_that_fails_once_tells_all_the_same",
        CONTROL + "test_announcer_of_the_endpoints_that_cannot_look_looks_again",
    ],
    "elasticflow-claim": [
        "tests/control/test_claimant.py::test_client_takes_no_unexpected_error_for_an_answer_either",
        CONTROL + "test_claim_whose_thread_fails_or_cannot_be_started_ends_the_line",
    ],
    "ef-saver": ["tests/storage/test_saver.py::test_saver_whose_thread_fails_is_not_waited_for"],
    "ef-write-back": ["tests/storage/test_write_back.py::test_thread_that_fails_fails_the_writing"],
    "ef-peers": ["tests/collectives/test_peer_connections.py::test_receiver_whom_nobody_can_reach_any_more_is_told"],
    "ef-peer": ["tests/collectives/test_peer_connections.py::test_sender_whose_welcome_fails_is_told"],
    "ef-connect-*": ["tests/collectives/test_connecting.py::test_error_of_connecting_is_raised_whatever_it_is"],
    "ef-nccl-*": ["tests/collectives/test_torch_nccl.py::test_nccl_that_fails_twice_is_left_to_gloo"],
    "ef-connect": ["tests/collectives/test_connecting.py::test_horovod_that_leaves_when_it_connects_is_not_waited_for"],
    "ef-send": [
        "tests/collectives/test_canonical.py::test_member_whose_sending_fails_does_not_wait_for_what_it_receives"
    ],
    "ef-rendezvous": ["tests/horovod/test_rendezvous.py::test_rendezvous_whose_thread_fails_refuses_horovod_at_once"],
    "elasticflow-driver-notices": [
        "tests/horovod/test_notices.py::test_driver_is_refused_when_the_thread_that_hears_it_has_failed"
    ],
    "elasticflow-driver": ["tests/launch/test_horovodrun.py::test_close_does_not_wait_for_a_driver_that_has_failed"],
    "elasticflow-ready": ["tests/launch/test_horovodrun.py::test_round_is_over_whatever_comes_up_while_ready_is_said"],
    "elasticflow-notices": [NOTICES + "test_worker_that_cannot_ask_to_leave_ends_when_its_time_is_over"],
    "elasticflow-notice-source": [NOTICES + "test_source_that_raises_is_asked_again"],
    "Timer": [NOTICES + "test_worker_whose_time_is_over_ends_even_if_there_can_be_no_more_threads"],
    "elasticflow-watch": ["tests/launch/test_frozen.py::test_fault_in_a_look_does_not_end_the_watch"],
    "elasticflow-ask": [
        "tests/control/test_inquiry.py::test_error_while_one_of_several_is_asked_reaches_the_one_that_looks"
    ],
    "elasticflow-names": [
        "tests/launch/test_told_doors.py::test_error_while_a_name_is_asked_for_reaches_the_one_that_looks"
    ],
    "elasticflow-seek": [
        "tests/launch/test_door_search.py::test_error_while_an_agent_is_asked_reaches_the_one_that_looks"
    ],
    "elasticflow-lookup": [
        "tests/control/test_name_lookups.py::test_error_of_a_look_up_reaches_the_one_that_waits",
        "tests/control/test_name_lookups.py::test_name_is_looked_up_although_there_can_be_no_more_threads",
    ],
    "elasticflow-registry": [
        "tests/launch/test_finding.py::test_error_while_the_registry_is_asked_ends_the_search_at_once"
    ],
    "elasticflow-registration": [
        "tests/storage/test_registry.py::"
        "test_signs_of_life_go_on_after_any_error_and_a_newer_start_is_told_until_it_is_heard",
        "tests/storage/test_registry.py::test_agent_ends_although_recording_its_end_fails",
    ],
    "elasticflow-departure": [
        "tests/launch/test_departure.py::test_workers_are_told_although_they_could_not_be_at_first"
    ],
    "elasticflow-host": [
        HOSTS + "test_link.py::test_link_whose_thread_fails_counts_as_ended",
        HOSTS + "test_link.py::test_link_whose_complaints_cannot_be_read_is_given_up_when_it_is_silent",
    ],
    "elasticflow-launcher": [HOSTS + "test_far_side.py::test_far_side_that_can_no_longer_hear_ends_the_connection"],
    "elasticflow-hosts": [HOSTS + "test_list.py::test_list_is_read_again_after_an_error_that_nobody_has_expected"],
    "elasticflow-show": [HOSTS + "test_output.py::test_nobody_waits_for_a_thread_that_can_no_longer_show_anything"],
    "elasticflow-mpi": ["tests/launch/test_mpi.py::test_launcher_does_not_wait_for_a_thread_that_has_failed"],
    "elasticflow-provisioner": [
        "tests/test_provisioners.py::test_thread_that_has_failed_is_replaced_with_the_next_order"
    ],
    "reads-ahead": [
        "tests/test_read_ahead.py::test_what_reading_raises_comes_with_the_entry",
        "tests/test_lane_ahead.py::test_shard_that_cannot_be_read_raises_where_the_batch_is_asked_for",
    ],
    "ef-parent": ["tests/test_read_ahead.py::test_process_that_cannot_wait_for_its_parent_does_not_outlive_it"],
    "elasticflow-*": [
        KUBERNETES + "test_copy_that_cannot_be_kept_for_once_is_read_anew",
        KUBERNETES + "test_controller_ends_if_one_of_its_threads_does",
    ],
    "elasticflow-reports": [KUBERNETES + "test_controller_ends_if_one_of_its_threads_does"],
    "elasticflow-lease": [KUBERNETES + "test_controller_ends_if_one_of_its_threads_does"],
    "elasticflow-acts": [
        "tests/kubernetes/test_controller.py::test_job_that_cannot_be_carried_out_keeps_nobody_waiting",
        "tests/kubernetes/test_controller.py::test_job_whose_calls_fail_keeps_nobody_waiting",
    ],
    "ef-read": ["tests/storage/test_store.py::test_read_into_from_a_store_that_ignores_ranges_fails"],
    "ef-hash": ["tests/storage/test_store.py::test_read_into_does_not_leave_out_what_could_not_be_hashed"],
    "elasticflow-probe": [
        "tests/cli/test_doctor.py::test_broken_package_is_a_line_of_the_thorough_report_and_so_is_what_needs_it"
    ],
    "elasticflow-gather": [
        "tests/kubernetes/test_gathering.py::test_error_while_one_of_several_pods_is_asked_ends_the_command"
    ],
    "elasticflow-page": [KUBERNETES + "test_probe_of_a_page_whose_thread_has_failed_gets_no_answer"],
    "elasticflow-pods": [
        "tests/kubernetes/test_clients.py::test_lines_that_cannot_be_read_for_whatever_reason_are_an_error"
    ],
    "elasticflow-pod-*": [
        "tests/kubernetes/test_clients.py::test_lines_that_cannot_be_read_for_whatever_reason_are_an_error"
    ],
    "elasticflow-metrics": [
        "tests/launch/test_worker_metrics.py::test_page_whose_thread_has_failed_refuses_connections"
    ],
    "ef-claims": ["tests/test_claiming.py::test_newcomer_goes_on_although_it_cannot_find_the_place"],
    "ef-close-group": [
        "tests/collectives/test_torch_group.py::test_group_is_let_go_of_although_waiting_for_its_operations_fails"
    ],
    "ef-abort-nccl": [
        "tests/collectives/test_torch_nccl.py::test_abort_does_not_wait_for_ever_if_nccl_cannot_be_aborted"
    ],
    "elasticflow-output": ["tests/test_terminal.py::test_output_that_cannot_be_replaced_stays_and_nothing_else_ends"],
}


Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Call:
    """A call, and where it stands.

    Args:
        file: In which file.
        function: The innermost function around it.
        node: The call itself.
        callee: What is called, such as ``threads.start``; a method of the same object begins with the file.
    """

    file: str
    function: Function | None
    node: ast.Call
    callee: str


class Calls(ast.NodeVisitor):
    """The calls in a module."""

    def __init__(self, file: str, source: str) -> None:
        self.found: list[Call] = []
        self._file = file
        self._function: Function | None = None
        self.visit(ast.parse(source))

    def visit_FunctionDef(self, node: Function) -> None:
        outer, self._function = self._function, node
        self.generic_visit(node)
        self._function = outer

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_Call(self, node: ast.Call) -> None:
        match node.func:
            case ast.Name(name):
                self.found.append(Call(self._file, self._function, node, name))
            case ast.Attribute(ast.Name("self"), name):
                self.found.append(Call(self._file, self._function, node, f"{self._file}:{name}"))
            case ast.Attribute(ast.Name(module), name):
                self.found.append(Call(self._file, self._function, node, f"{module}.{name}"))
        self.generic_visit(node)


@functools.cache
def calls() -> list[Call]:
    """The calls in all modules of the packages."""
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    return [call for file in files for call in Calls(str(file.relative_to(ROOT)), file.read_text()).found]


def name_of(value: ast.expr, function: Function | None) -> str:
    """A name as the table has it: whatever differs from thread to thread is a star."""
    match value:
        case ast.Constant(str(text)):
            return text
        case ast.JoinedStr(parts):
            return "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in parts)
        case ast.Name(variable):
            for node in ast.walk(function) if function is not None else ():
                if isinstance(node, ast.Assign):
                    targets, values = _flat(node.targets[0]), _flat(node.value)
                    for target, assigned in zip(targets, values, strict=False):
                        if isinstance(target, ast.Name) and target.id == variable:
                            return name_of(assigned, function)
            return variable
    raise AssertionError(f"a thread has a name that this test does not understand: {ast.unparse(value)}")


def _flat(value: ast.expr) -> list[ast.expr]:
    return value.elts if isinstance(value, ast.Tuple) else [value]


def names_of_threads(found: Iterable[Call]) -> set[str]:
    """The names of all threads that these calls start."""
    names: set[str] = set()
    starters = {"threads.start": -1}  # where the name stands among the arguments, if not behind `name=`
    left = list(found)
    for _ in range(2):  # functions that start a thread under the name that they are given are found first
        found, left = left, []
        for call in found:
            given = {one.arg: one.value for one in call.node.keywords}
            name = given.get("thread_name_prefix")
            if name is None and call.callee.rpartition(".")[2] == "ThreadPoolExecutor":
                name = call.node.args[1] if len(call.node.args) > 1 else ast.Constant("ThreadPoolExecutor")
            if call.callee in NOT_OURS:
                name = given.get("name", ast.Constant(call.callee.rpartition(".")[2]))
            elif call.callee in starters:
                name = given.get("name") or call.node.args[starters[call.callee]]
            if name is None:
                left.append(call)
            elif isinstance(name, ast.Name) and name.id in (places := _parameters(call.function)):
                starters[_called_as(call)] = places[name.id]
            else:
                names.add(name_of(name, call.function))
    return names


def _parameters(function: Function | None) -> dict[str, int]:
    if function is None:
        return {}
    given = [one.arg for one in (*function.args.args, *function.args.kwonlyargs) if one.arg != "self"]
    return {name: place for place, name in enumerate(given)}


def _called_as(call: Call) -> str:
    """How the function around a call is called itself."""
    assert call.function is not None
    is_method = any(one.arg == "self" for one in call.function.args.args)
    return f"{call.file}:{call.function.name}" if is_method else call.function.name


def names_in_the_table() -> list[str]:
    section = (
        (ROOT / "docs" / "architecture.md").read_text().partition("### Threads that fail\n")[2].partition("\n#")[0]
    )
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| ")][1:]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row[2])]


def test_table_names_every_thread_and_each_has_a_test_in_which_it_fails() -> None:
    found = names_of_threads(call for call in calls() if call.file != OURS)
    table = names_in_the_table()
    assert sorted(set(table)) == sorted(table) == sorted(found)
    assert found == set(WITNESSES)


@pytest.mark.parametrize("name", WITNESSES)
def test_test_in_which_a_thread_fails_is_there(name: str) -> None:
    assert WITNESSES[name]
    for witness in WITNESSES[name]:
        file, _, test = witness.partition("::")
        assert f"\ndef {test}(" in (ROOT / file).read_text()


def test_threads_that_nobody_watches_over_are_in_known_places() -> None:
    assert {call.file for call in calls() if call.callee in NOT_OURS} == UNWATCHED


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("threads.start(f, name='a', job='')", {"a"}),
        ("def f(x):\n    threads.start(f, name=f'a-{x}', job='')", {"a-*"}),
        (
            "class A:\n    def f(self):\n        n, j = f'b-{self}', 'j'\n        threads.start(f, name=n, job=j)",
            {"b-*"},
        ),
        ("def go(n, f):\n    threads.start(f, name=n, job='')\ngo('c', 1)", {"c"}),
        ("def go(f, *, name):\n    threads.start(f, name=name, job='')\ngo(1, name='d')", {"d"}),
        (
            "class A:\n    def go(self, n):\n        threads.start(1, name=n)\n    def x(self):\n        self.go('e')",
            {"e"},
        ),
        ("threading.Thread(target=f)\nthreading.Timer(1, f)", {"Thread", "Timer"}),
        ("ThreadPoolExecutor(1, thread_name_prefix='g')", {"g"}),
        ("ThreadPoolExecutor(1, 'g')", {"g"}),
        ("ThreadPoolExecutor(1)", {"ThreadPoolExecutor"}),
    ],
)
def test_threads_are_found(source: str, names: set[str]) -> None:
    assert names_of_threads(Calls("", source).found) == names
