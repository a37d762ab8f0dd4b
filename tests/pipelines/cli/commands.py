"""commands: commands of `troupe` as a JSON list of word lists, each with --root -> [[exit code, output], ...], in one process: imports take seconds."""

from __future__ import annotations

import json
import sys

from typer.testing import CliRunner

from pipelines.cli.main import app


def main() -> None:
    """Runs the commands of the first argument and prints what they said as the last line."""
    done = [CliRunner().invoke(app, command) for command in json.loads(sys.argv[1])]
    print(json.dumps([[each.exit_code, each.output] for each in done]))


if __name__ == "__main__":
    main()
