"""What the commands share: how an error ends one, and what TEAM@ALIAS is."""

from __future__ import annotations

import pytest
import typer

from pipelines.cli.options import errors, split_team

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("end", [typer.Exit(3), typer.Abort(), typer.BadParameter("no")])
def test_a_command_of_an_extension_may_end_as_those_of_typer_do(end: Exception) -> None:
    with pytest.raises(type(end)), errors(debug=False):
        raise end


def test_a_broken_pipe_that_is_not_the_output_is_lost_infrastructure(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end, errors(debug=False):
        raise BrokenPipeError(32, "Broken pipe")
    assert end.value.code == 75 and "infrastructure lost, repeat" in capsys.readouterr().err


def test_the_folder_of_a_run_config_may_have_an_at_sign() -> None:
    assert split_team("/home/me@site/run.yaml@3") == ("/home/me@site/run.yaml", "3")
    with pytest.raises(ValueError, match=r"'/home/me@site/run.yaml' is not of the form TEAM@ALIAS"):
        split_team("/home/me@site/run.yaml")
