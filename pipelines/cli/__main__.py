"""Entry point of `troupe` and of `python -m pipelines.cli`: checks the path for names that hide Troupe's, then starts the command.

With `python -m`, or with PYTHONPATH, a user's folder is on the path from the start: nothing but the check may be imported before.
"""

from __future__ import annotations

import atexit
import os
import sys

from pipelines.cluster.user_code import check_names


def main() -> None:
    """Runs the command; exit code 2 where a module on the path hides a package of Troupe."""
    code = 1
    atexit.register(lambda: _end(code))  # registered first, so it runs last
    try:
        _run()
        code = 0
    except KeyboardInterrupt:
        code = 130
        raise
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        raise


def _run() -> None:
    try:
        check_names(sys.path)
    except ValueError as fault:
        print(f"troupe: {fault}", file=sys.stderr)
        raise SystemExit(2) from None
    from pipelines.cli.main import main as run_command

    run_command()


def _end(code: int) -> None:
    """Ends the process; taking the modules of Ray, torch and MLflow apart, which Python would do now, needs 1 to 3 s.

    What is written only then, as a file that was never closed, is lost.
    """
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        pass  # nobody reads any more; Python would say so
    except OSError as error:  # mostly the disk is full
        if code == 0:  # otherwise it was told
            print(f"troupe: this command's output cannot be written: {error.strerror}", file=sys.stderr)
        code = code or 1
    except (ValueError, AttributeError):
        return  # the streams are closed: Python has its ways for it
    os._exit(code)


if __name__ == "__main__":
    main()
