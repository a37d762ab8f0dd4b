"""sandbox: a program that a model wrote -> what it says on given inputs, and nothing else.

    Sandbox.run(Program, inputs) ──> bwrap (namespaces, seccomp) ──> runner.py ──fork──> one child per input
                                 <── exit code, output, seconds ──────────────────────┘   (limits)

What is expected of the program never goes in; who asks compares, outside (`checkers.py`).
"""

from serve_apps.tools.sandbox.sandbox import MAX_TIMEOUTS, CaseRun, Program, Sandbox, SandboxUnavailable

__all__ = ["MAX_TIMEOUTS", "CaseRun", "Program", "Sandbox", "SandboxUnavailable"]
