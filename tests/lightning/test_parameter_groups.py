"""Groups that another worker's optimizer has, found by the names of their parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ef_common.errors import ElasticFlowError
from ef_lightning.parameter_groups import add_again, add_nothing_twice, follow, groups_of


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))


def grown(module: Any, *, named: bool = False) -> torch.optim.Optimizer:
    """An optimizer of the first layer, to which the others were added."""

    def of(layer: int) -> list[Any]:
        parameters = module[layer].named_parameters(prefix=str(layer))
        return list(parameters) if named else [p for _, p in parameters]

    optimizer = torch.optim.SGD(of(0), 0.1, momentum=0.5)
    optimizer.add_param_group({"params": of(2), "lr": 0.2})
    optimizer.add_param_group({"params": of(1), "lr": 0.3, "momentum": 0.9})
    return optimizer


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("own", [[[0]], [[0], [2]], [[0], [1], [2]], [[0, 1, 2]], [[1], [0]]])
def test_optimizer_with_other_groups_gets_those_of_another_worker(own: list[list[int]], named: bool) -> None:
    theirs, mine = net(), net()
    other = grown(theirs, named=named)

    def of(layers: list[int]) -> list[Any]:
        pairs = [pair for layer in layers for pair in mine[layer].named_parameters(prefix=str(layer))]  # type: ignore[index]
        return pairs if named else [p for _, p in pairs]

    optimizer = torch.optim.SGD([{"params": of(layers)} for layers in own], 0.7, momentum=0.5)
    wanted = groups_of(other, theirs)
    follow(optimizer, mine, wanted, other.state_dict()["param_groups"])
    optimizer.load_state_dict(other.state_dict())
    assert groups_of(optimizer, mine) == wanted == [[f"{n}.{p}" for p in ("weight", "bias")] for n in (0, 2, 1)]
    assert [(group["lr"], group["momentum"]) for group in optimizer.param_groups] == [
        (0.1, 0.5),
        (0.2, 0.5),
        (0.3, 0.9),
    ]
    assert optimizer.state_dict() == other.state_dict()


def test_parameters_that_the_module_lacks_are_named() -> None:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    wanted = [*groups_of(optimizer, module), ["3.weight", ""]]
    with pytest.raises(ElasticFlowError, match=r"Received: 3.weight, \(none of the model's\) in SGD"):
        follow(optimizer, module, wanted, optimizer.state_dict()["param_groups"])


def test_groups_that_are_there_already_are_not_added_twice() -> None:
    module: Any = net()
    optimizer = torch.optim.SGD(module[0].parameters(), 0.1)
    add_nothing_twice([optimizer])
    optimizer.add_param_group({"params": module[0].weight})
    optimizer.add_param_group({"params": (p for layer in module[:2] for p in layer.parameters())})
    assert groups_of(optimizer, module) == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]
    add_again([optimizer])
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": module[0].weight})
