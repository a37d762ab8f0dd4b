"""Settings of the papers' rules that nobody may give them."""

from __future__ import annotations

from typing import Any

import pytest
from by_hand import refuse_unknown_agent

from pipelines.config.sections import DottedConfig
from pipelines.credit.rule import load_credit

pytestmark = pytest.mark.fast

DEBATE = "pipelines.extensions.paper_credit.debate:DebateReward"
DIFFERENCE = "pipelines.extensions.paper_credit.difference:DifferenceReward"


@pytest.mark.parametrize(
    ("path", "settings", "place"),
    [
        (DEBATE, {"debaters": ["solver", "nobody"]}, "debaters.1"),
        (DIFFERENCE, {"inner": {"path": DEBATE}, "agents": ["nobody"]}, "agents.0"),
        (DIFFERENCE, {"inner": {"path": DEBATE, "settings": {"debaters": ["nobody"]}}}, "inner.settings.debaters.0"),
    ],
)
def test_settings_that_name_an_agent_which_the_run_has_not_are_refused(
    path: str, settings: dict[str, Any], place: str
) -> None:
    refuse_unknown_agent(path, settings, place)


def test_a_setting_out_of_its_range_is_one_clear_message() -> None:
    with pytest.raises(ValueError, match=r"settings\.gamma: .*or equal to 0"):
        load_credit(DottedConfig(path=DEBATE, settings={"gamma": -3}))
