"""figures: rules about figures of one's own, by their names: nothing of a user's is imported where a config is read."""

from __future__ import annotations

import re

from pipelines.config.messages import near
from pipelines.config.run_sections import RunSections
from pipelines.figures.registry import FIGURES, own_name

PATH = re.compile(r"[\w.]+:\w+")


def own_figures_have_names(config: RunSections) -> None:
    """Each path of `evaluate.figures` has a name that no other figure has."""
    known = set(FIGURES)
    for number, path in enumerate(config.evaluate.figures):
        if PATH.fullmatch(path) is None:
            raise ValueError(f"evaluate.figures.{number}: {path!r} is not of the form 'package.module:name'")
        if own_name(path) in known:
            raise ValueError(f"evaluate.figures.{number}: there is a figure {own_name(path)!r} already: rename yours")
        known.add(own_name(path))


def limits_are_of_figures(config: RunSections) -> None:
    """Each key of `promote.guards` and `watch.floors` is a figure of Troupe's or of `evaluate.figures`."""
    own = [own_name(path) for path in config.evaluate.figures]
    for section, limits in (("promote.guards", config.promote.guards), ("watch.floors", config.watch.floors)):
        known = [*type(limits).model_fields, *own]
        for name in limits.model_extra or ():
            if name not in known:
                raise ValueError(
                    f"unknown key '{section}.{name}'{near(name, known)} A figure of your own needs its path in evaluate.figures"
                )
