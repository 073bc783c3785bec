"""The controller's numbers, as Prometheus reads them."""

from __future__ import annotations

from ef_common.kubernetes.metrics import Metrics


def test_answers_of_the_api_server_are_counted_by_status_and_their_durations_by_limits() -> None:
    metrics = Metrics()
    assert "api" not in metrics.text()
    for status, duration_s in ((201, 0.004), (201, 0.25), (409, 0.01), (0, 12.0)):
        metrics.answered("POST", status, duration_s)
    metrics.answered("WATCH", 410, None)
    found = [line for line in metrics.text().splitlines() if "_api_" in line]
    name = "elasticflow_controller_api"
    assert found == [
        f'{name}_answers_total{{verb="POST",code="0"}} 1',
        f'{name}_answers_total{{verb="POST",code="201"}} 2',
        f'{name}_answers_total{{verb="POST",code="409"}} 1',
        f'{name}_answers_total{{verb="WATCH",code="410"}} 1',
        f'{name}_seconds_bucket{{verb="POST",le="0.01"}} 2',
        f'{name}_seconds_bucket{{verb="POST",le="0.1"}} 2',
        f'{name}_seconds_bucket{{verb="POST",le="1"}} 3',
        f'{name}_seconds_bucket{{verb="POST",le="10"}} 3',
        f'{name}_seconds_bucket{{verb="POST",le="+Inf"}} 4',
        f'{name}_seconds_sum{{verb="POST"}} 12.264000',
        f'{name}_seconds_count{{verb="POST"}} 4',
    ]
