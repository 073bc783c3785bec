"""A program of a user's that is checked by mypy and never run: the public names have types that fit the frameworks."""

from __future__ import annotations

import lightning.pytorch
import pytorch_lightning
import torch

import ef_keras
import ef_lightning
import elasticflow
from ef_lightning import Checkpointing, Compensation, ElasticFlowStrategy

versions: list[str] = [ef_keras.__version__, ef_lightning.__version__, elasticflow.__version__]

strategy = ElasticFlowStrategy(checkpoint=Checkpointing("s3://bucket/run", every_steps=100), compensation="sqrt")
lightning.pytorch.Trainer(strategy=strategy, max_epochs=1)
pytorch_lightning.Trainer(strategy=ElasticFlowStrategy("gloo", compensation=Compensation("linear")))


def model() -> dict[str, object]:
    net = torch.nn.Linear(4, 2)
    return {"net": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1)}


launched: elasticflow.Launched = elasticflow.launch(print, 1, 2, workers=2, checkpoint="s3://bucket/run")
holds: bool = elasticflow.audit(launched.run_dir).ok

result: elasticflow.Result = elasticflow.train(model, lambda x, net: net(x).sum(), (torch.zeros(8, 4),), epochs=2)
