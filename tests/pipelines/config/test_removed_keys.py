"""A config key that is no more is refused with what to do."""

from __future__ import annotations

import pytest

from pipelines.config.run_config import parse_config
from tests.pipelines.config.test_renamed import changed

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("place", ["train", "model_groups.solver_verifier.train"])
def test_the_statuses_that_are_trained_on_are_no_setting_any_more(place: str) -> None:
    with pytest.raises(ValueError, match=r"unknown key '.*train_statuses': drop it: who caused a failure decides"):
        parse_config(changed(f"{place}.train_statuses", ["ok"]), "run.yaml")
