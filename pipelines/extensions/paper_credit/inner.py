"""inner: the `inner` setting of a credit rule -> the rule that it wraps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from pipelines.config.messages import explain
from pipelines.config.sections import DottedConfig
from pipelines.credit.rule import CreditRule, credit_version, load_credit

PLACE = "credit.settings.inner"


def load_inner(inner: Mapping[str, Any]) -> tuple[CreditRule, str]:
    """Returns the rule that `{path, settings}` names, and its `credit_version`.

    Raises ValueError if it is not of this form, cannot be imported, is no rule or refuses its settings.
    """
    try:
        config = DottedConfig.model_validate(inner)
    except ValidationError as error:
        raise ValueError(explain(error, DottedConfig, PLACE)) from None
    rule = load_credit(config, place=PLACE)
    if hasattr(rule, "infer"):
        raise ValueError(
            f"{PLACE}: {config.path} learns from earlier iterations, which only the outermost rule is given: wrap the other rule in it"
        )
    return rule, credit_version(config)
