from __future__ import annotations

from tests.tiers.choice import Case, chosen, covering


def cases(function: str, *values: str, skipped: tuple[str, ...] = ()) -> list[Case]:
    return [Case(f"{function}[{v}]", function, (("host", v),), runs=v not in skipped) for v in values]


def grid(function: str, hosts: str, sizes: tuple[int, ...], skipped: str = "") -> list[Case]:
    return [
        Case(f"{function}[{host}-{size}]", function, (("host", host), ("size", size)), runs=host not in skipped)
        for host in hosts
        for size in sizes
    ]


def test_choice_of_one_test_is_its_first_case() -> None:
    assert chosen(cases("a", "x", "y")) == {"a[x]"}


def test_choice_of_several_tests_takes_turns() -> None:
    found = chosen([case for function in "abcd" for case in cases(function, "x", "y", "z")])
    assert found == {"a[x]", "b[y]", "c[z]", "d[x]"}


def test_choice_takes_what_costs_twice_as_much_half_as_often() -> None:
    dear = [Case(f"{function}[y]", function, (("host", "y"),), cost=2.0) for function in "abcdef"]
    found = [*(case for function in "abcdef" for case in cases(function, "x")), *dear]
    assert chosen(found) == {"a[x]", "b[x]", "c[y]", "d[x]", "e[x]", "f[y]"}


def test_choice_with_two_parameters_prefers_what_is_new_in_both() -> None:
    assert chosen([*grid("a", "xy", (2, 3)), *grid("b", "xy", (2, 3))]) == {"a[x-2]", "b[y-3]"}


def test_choice_leaves_out_what_would_be_skipped() -> None:
    assert chosen(cases("a", "x", "y", skipped=("x",))) == {"a[y]"}


def test_choice_of_a_test_that_cannot_run_is_shown_as_skipped() -> None:
    assert chosen(cases("a", "x", "y", skipped=("x", "y"))) == {"a[x]"}


def test_choice_does_not_depend_on_other_tests_after_it() -> None:
    some, more = ([case for function in functions for case in cases(function, "x", "y")] for functions in ("ab", "abc"))
    assert chosen(some) < chosen(more)


def test_cases_that_cover_a_test_have_each_value_of_each_parameter() -> None:
    assert covering(grid("a", "xyz", (2, 3)), {"a[x-2]"}) == {"a[x-2]", "a[y-3]", "a[z-2]"}


def test_cases_that_cover_several_tests_have_other_pairs_in_each() -> None:
    cases = [case for function in "abc" for case in grid(function, "xyz", (2, 3))]
    found = covering(cases, {"a[x-2]", "b[x-3]", "c[x-2]"})
    assert {name[1:] for name in found} == {f"[{host}-{size}]" for host in "xyz" for size in (2, 3)}


def test_case_that_is_skipped_covers_only_what_no_other_one_has() -> None:
    assert covering(grid("a", "xy", (2, 3), skipped="x"), {"a[y-2]"}) == {"a[y-2]", "a[y-3]", "a[x-2]"}


def test_test_without_parameters_is_its_only_case() -> None:
    assert covering([Case("a", "a")], {"a"}) == {"a"}


def test_of_a_platform_two_values_are_taken_in_turns() -> None:
    cases = [case for function in "abc" for case in grid(function, "wxyz", (2, 3))]
    found = covering(cases, {"a[w-2]", "b[x-3]", "c[y-2]"}, ["host"])
    assert found == {"a[w-2]", "a[x-3]", "b[x-3]", "b[y-2]", "c[y-2]", "c[z-3]"}


def test_platform_that_is_skipped_is_shown() -> None:
    assert covering(cases("a", "x", "y", "z", skipped=("y",)), {"a[x]"}, ["host"]) == {"a[x]", "a[y]", "a[z]"}
