"""sandbox: a program that a model wrote, inputs -> its outputs, and no other effect.

    Sandbox.run(Program, inputs) ──> bwrap (namespaces, seccomp) ──> runner.py ──fork──> one child per input
                                 <── exit code, output, seconds ──────────────────────┘   (limits)

Expected outputs never enter the sandbox; the caller compares outside (`checkers.py`).
"""

from serve_apps.extensions.sandbox.sandbox import MAX_TIMEOUTS, Call, CaseRun, Program, Sandbox, SandboxUnavailable

__all__ = ["MAX_TIMEOUTS", "Call", "CaseRun", "Program", "Sandbox", "SandboxUnavailable"]
