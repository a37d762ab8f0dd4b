"""Advantage estimators, one pure file each; infra/docs/design/formulas.md has them in one table."""
