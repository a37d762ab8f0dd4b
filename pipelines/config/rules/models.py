"""models: rules about what each model group starts from, its overrides, and bases that several groups share."""

from __future__ import annotations

from pipelines.config.run_sections import RunSections


def every_group_has_a_model(config: RunSections) -> None:
    """Every model group has a model, or the warm start makes one; never both, since only one can be version 0."""
    made = config.warmstart is not None and config.warmstart.tiny_model is not None
    for group, settings in config.model_groups.items():
        if settings.model and made:
            raise ValueError(
                f"model_groups.{group}.model = {settings.model!r} would not be used, because warmstart.tiny_model makes the models "
                "of all groups: drop `model`, or set warmstart.tiny_model: null"
            )
        if not settings.model and not made:
            raise ValueError(
                f"model_groups.{group}.model is missing: name a Hugging Face folder, "
                "or give a `warmstart` section with a `tiny_model`"
            )


def overrides_parse(config: RunSections) -> None:
    """The overrides of every model group make valid sections."""
    for group in config.model_groups:
        config.train_config(group)
        config.serve_config(group)
        config.tiny_model(group)


def adapters_have_one_base(config: RunSections) -> None:
    """Adapters name a base, only adapters do, and those of one base agree about the model and its app."""
    for group, settings in config.model_groups.items():
        has_lora = config.train_config(group).lora is not None
        if has_lora and not settings.base:
            raise ValueError(
                f"model_groups.{group}: train.lora trains an adapter, but of which base? name one: base: shared"
            )
        if settings.base and not has_lora:
            raise ValueError(
                f"model_groups.{group}.base = {settings.base!r}: a base stays frozen, so train.lora is needed: "
                "give train: {lora: {rank: 8}}, or drop the base to train all weights"
            )
        if settings.base in config.model_groups:
            raise ValueError(
                f"model_groups.{group}.base = {settings.base!r} is a model group: a base needs a name of its own"
            )
    for base, members in config.bases.items():
        for what in ("model", "tiny_model", "serve"):
            values = {group: getattr(config.model_groups[group], what) for group in members}
            if any(value != values[members[0]] for value in values.values()):
                raise ValueError(
                    f"model_groups with base {base!r} share one model on one app, but differ in `{what}`: {values}"
                )
