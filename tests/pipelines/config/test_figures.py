"""One figure has one name: every section of the config, the gateway and the checks take theirs from one table."""

from __future__ import annotations

import pytest

from pipelines.config.figures import FIGURES, figure_of
from pipelines.config.sections import GuardsConfig, TrafficGuardsConfig, WatchFloorsConfig
from pipelines.evaluation.guards import VALUES
from pipelines.monitoring.training_warnings import CHECKS
from serve_apps.gateway.traffic.figures import NAMES

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    "names",
    [
        GuardsConfig.model_fields,
        TrafficGuardsConfig.model_fields,
        WatchFloorsConfig.model_fields,
        NAMES,
        [check.figure for check in CHECKS],
    ],
    ids=["promote.guards", "traffic.guards", "watch.floors", "gateway", "training warnings"],
)
def test_every_figure_that_is_compared_is_in_the_table(names: list[str]) -> None:
    assert set(names) <= FIGURES.keys()


def test_a_guard_that_can_be_set_can_be_measured() -> None:
    assert VALUES.keys() == GuardsConfig.model_fields.keys()
    assert set(NAMES) == TrafficGuardsConfig.model_fields.keys()
    assert set(NAMES) <= WatchFloorsConfig.model_fields.keys(), "every window of the gateway is checked"


def test_shares_are_compared_by_difference_and_a_figure_of_an_agent_is_that_of_the_team() -> None:
    shares = {name: figure.compared_by for name, figure in FIGURES.items() if name.endswith("_share")}
    del shares["clip_share"]  # a jump to a multiple is what counts
    assert len(shares) > 5 and set(shares.values()) == {"difference"}
    assert figure_of("entropy/solver") is FIGURES["entropy"]
    with pytest.raises(KeyError):
        figure_of("cheer")
