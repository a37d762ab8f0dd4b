"""Entry point of `troupe` and of `python -m pipelines.cli`: checks the path for names that hide Troupe's, then starts the command.

With `python -m`, or with PYTHONPATH, a user's folder is on the path from the start: nothing but the check may be imported before.
"""

from __future__ import annotations

import sys

from pipelines.cluster.user_code import check_names


def main() -> None:
    """Runs the command; exit code 2 where a module on the path hides a package of Troupe."""
    try:
        check_names(sys.path)
    except ValueError as fault:
        print(f"troupe: {fault}", file=sys.stderr)
        raise SystemExit(2) from None
    from pipelines.cli.main import main as run_command

    run_command()


if __name__ == "__main__":
    main()
