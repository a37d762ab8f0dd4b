"""An address at which no cluster answers is told soon and without noise."""

from __future__ import annotations

import pytest

from pipelines import cluster
from pipelines.faults import InfrastructureLost


def test_a_cluster_that_does_not_answer_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "ANSWER_TIMEOUT_S", 0.1)
    with pytest.raises(InfrastructureLost, match=r"'127.0.0.1:1' .*refused.*make up"):
        cluster.check_answers("127.0.0.1:1")


def test_a_machine_that_no_one_knows_is_bad_input() -> None:
    with pytest.raises(ValueError, match=r"no machine is called 'nohost\.invalid'"):
        cluster.check_answers("nohost.invalid:6379")


@pytest.mark.parametrize("address", ["auto", "local", "ray://127.0.0.1:1"])
def test_other_kinds_of_address_are_left_to_ray(address: str) -> None:
    cluster.check_answers(address)
