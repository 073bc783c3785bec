"""What a controller knows of the objects of a kind; see also the tests of the controller and of excerpts."""

from __future__ import annotations

from ef_common.kubernetes.kinds import PODS
from ef_common.kubernetes.resource import Json
from ef_common.kubernetes.watching import Copy
from tests.kubernetes.memory_api import MemoryApi


def test_answer_that_is_later_than_the_news_of_the_end_does_not_bring_an_object_back(api: MemoryApi) -> None:
    copy = Copy(api, PODS, on_change=lambda: None)  # type: ignore[arg-type]
    meta = {"name": "a", "namespace": "here"}
    made: Json = api.create(PODS, {"metadata": meta, "spec": {}})
    copy._take("ADDED", made)
    copy._take("DELETED", made)
    copy.update(made)
    assert copy.objects() == []
    again = api.create(PODS, {"metadata": {**meta, "name": "b"}, "spec": {}})
    copy.update(again)
    assert [one["metadata"]["name"] for one in copy.objects()] == ["b"]
