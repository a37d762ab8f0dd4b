"""estimators: the name of an estimator of advantages, or a dotted path to a user's own -> its function, and what that needs of a run.

Nothing heavy is imported, because configs are parsed with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin, get_type_hints

from stores.by_name import line_of, open_by_name

FORM = "a function of (rows, settings), or an Estimator with one"
CORE, PAPERS = "train_loops.advantages", "train_loops.extensions.paper_estimators"
WHOLE_TEAM = "train_loops.extensions.whole_team"
NLL_GAIN = f"{PAPERS}.nll_gain:nll_gain"
"""The factor of `advantage.nll_gain` on advantages (UMAD, arXiv 2603.01221)."""
TEAM_LEARNER = f"{WHOLE_TEAM}.trainer:train_team_learner"
"""Does the jobs of central critics and mixers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """An estimator of advantages. A user's own is one of these in his module, or just the function where it needs nothing else."""

    function: Callable[..., Any] | str = ""
    """`function(rows: RewardedRows, settings: AdvantageConfig)`, see `train_loops/advantages/rewarded_rows.py`, or a dotted path to it.
    Empty where a critic's values are turned into advantages by GAE."""
    compares: Literal["", "turns", "episodes"] = ""
    """What it compares among the episodes of a task: then a task is played more than once."""
    needs_siblings: bool = False
    """Whether it does nothing at all where a task is played once, whatever a group of one is given."""
    variants: Literal["", "greedy", "counterfactual", "leave_one_out"] = ""
    """The kind of variants (`collect.variants`) that its rows are held against, as `rows.baselines`."""
    divides: bool = False
    """Whether it divides by the standard deviation of a group where `advantage.normalize_std` is on."""
    takes_increments: bool = True
    """Whether rewards may be parts of the outcome."""
    critic: Literal["", "model_group", "team"] = ""
    """Whose critic gives it values: one of the model group, or the central one of the team."""
    whitens: Literal["all", "agent"] = "all"
    """The rows over which GAE whitens where `advantage.whiten` is null."""
    updates_in_turn: bool = False
    """Whether model groups are updated one after another, each weighed by the updates before it (HAPPO, arXiv 2109.11251)."""
    figures: Callable[..., Any] | str = ""
    """`figures(rows, settings)` -> metrics of its own, by name; empty: none."""

    @property
    def extension(self) -> str:
        """Returns the package of Troupe's extension that it is of; empty for one of the core, or of a user's own."""
        if self.critic == "team":
            return WHOLE_TEAM
        return PAPERS if isinstance(self.function, str) and self.function.startswith(f"{PAPERS}.") else ""

    def __call__(self, rows: Any, settings: Any) -> Any:
        """Returns [N], one advantage per row, or N arrays, one value per completion token.

        Raises ValueError, with file and line, where a user's own function fails.
        """
        return _called(self.function, rows, settings)

    def metrics(self, rows: Any, settings: Any) -> dict[str, float]:
        """Returns its own figures of an iteration's rows; ValueError for what is no number by a name."""
        own = _called(self.figures, rows, settings) if self.figures else {}
        try:
            return {name: float(value) for name, value in own.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                f"train.algorithm: figures of the estimator are {own!r:.200}, and must be a dict of numbers by their names: {error}"
            ) from None


ESTIMATORS: dict[str, Estimator] = {
    "ppo": Estimator(critic="model_group"),
    "ippo": Estimator(critic="model_group", whitens="agent"),
    "mappo": Estimator(critic="team", whitens="agent"),
    "happo": Estimator(critic="team", whitens="agent", updates_in_turn=True),
    "grpo": Estimator(function=f"{CORE}.grpo:grpo", compares="episodes", divides=True),
    "dr_mas": Estimator(function=f"{CORE}.dr_mas:dr_mas", compares="turns", divides=True),
    "at_grpo": Estimator(function=f"{PAPERS}.group_estimators:at_grpo", compares="turns", divides=True),
    "rloo": Estimator(function=f"{CORE}.rloo:rloo", compares="episodes"),
    "reinforce_pp": Estimator(function=f"{PAPERS}.reinforce_pp:reinforce_pp"),
    "reinforce_pp_baseline": Estimator(function=f"{PAPERS}.reinforce_pp:reinforce_pp_baseline", compares="turns"),
    "remax": Estimator(function=f"{CORE}.against_baseline:against_baseline", variants="greedy"),
    "opo": Estimator(function=f"{PAPERS}.group_estimators:opo", compares="turns"),
    "gpg": Estimator(function=f"{PAPERS}.group_estimators:gpg", compares="turns"),
    "pass_at_k": Estimator(
        function=f"{PAPERS}.group_estimators:pass_at_k", compares="episodes", needs_siblings=True, divides=True
    ),
    "gigpo": Estimator(
        function=f"{PAPERS}.gigpo:gigpo",
        compares="episodes",
        needs_siblings=True,
        divides=True,
        figures=f"{PAPERS}.gigpo:figures",
    ),
    "counterfactual": Estimator(function=f"{CORE}.against_baseline:against_baseline", variants="counterfactual"),
    "leave_one_out": Estimator(
        function=f"{CORE}.against_baseline:against_baseline", variants="leave_one_out", takes_increments=False
    ),
}
"""By the name in a config. `infra/docs/design/formulas.md` has each in one table."""


def estimator_of(algorithm: str) -> Estimator:
    """Returns what `train.algorithm` names.

    Raises:
        ValueError: it is no known name, and no path to an estimator that can be imported without a heavy library.
    """
    if ":" not in algorithm:
        if algorithm in ESTIMATORS:
            return ESTIMATORS[algorithm]
        nearest = get_close_matches(algorithm, ESTIMATORS, n=1)
        meant = f"did you mean {nearest[0]!r}?" if nearest else f"there are {', '.join(ESTIMATORS)}."
        raise ValueError(f"no estimator of this name: {meant} One of your own is 'module:name', {FORM}")
    found = open_by_name(algorithm, place="", wanted=FORM, fits=_is_estimator, is_parsing=True)
    if not isinstance(found, Estimator):
        return Estimator(function=found)
    _check_own(found)
    return found


def _check_own(own: Estimator) -> None:
    if own.critic:
        raise ValueError(
            f"critic={own.critic!r}: a critic's values are turned into advantages by GAE, and the function of your own would not be "
            "called: drop `critic`, or take an algorithm with a critic (ppo, ippo, mappo, happo)"
        )
    for key, hint in get_type_hints(Estimator).items():
        allowed = get_args(hint) if get_origin(hint) is Literal else ()
        if allowed and getattr(own, key) not in allowed:
            raise ValueError(f"{key}={getattr(own, key)!r}: allowed are {', '.join(map(repr, allowed))}")
    for key in ("function", "figures"):
        given = getattr(own, key)
        found = open_by_name(given, place=key, is_parsing=True) if given and isinstance(given, str) else given
        if found != "" and not callable(found):
            raise ValueError(f"{key}={given!r}: give a function of (rows, settings), or the path of one")


def _is_estimator(found: Any) -> bool:
    if isinstance(found, Estimator):
        return bool(found.function)
    return callable(found) and not isinstance(found, type)


def _called(function: Callable[..., Any] | str, rows: Any, settings: Any) -> Any:
    opened = open_by_name(function, place="train.algorithm") if isinstance(function, str) else function
    try:
        return opened(rows, settings)
    except OSError:  # of a file that it reads: the job is done again
        raise
    except Exception as error:
        if not (line := line_of(error)):  # no code of a user's ran
            raise
        name = getattr(opened, "__qualname__", repr(opened))
        raise ValueError(f"train.algorithm: {name} fails ({type(error).__name__}: {error}{line})") from error
