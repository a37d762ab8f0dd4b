"""template_process: a chat template -> what it writes, in a process of its own with limits of time, memory and length.

    parent ── {"template", "plain", "may_refuse"} as JSON on standard input ──> `python template_process.py`
           <── {"plain", "others"}, or {"error", "line"}, as JSON on standard output ──

A template is a program of somebody else. Jinja's sandbox keeps it from files and network, and neither from looping for years nor
from filling the memory. This file is run by its path and imports nothing of Troupe, so that it starts in a moment.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

LIMIT_S = 10.0
"""Seconds for the process: a template of a real model takes milliseconds, the start of the process most of a second."""
MEMORY_BYTES = 1 << 30
MAX_CHARACTERS = 1_000_000
"""Characters that a template may write around a conversation of three short messages."""


class TemplateFault(ValueError):
    """Raised where a template fails or breaks a limit. `line` is the line of the template, 0 where none is known."""

    def __init__(self, message: str, *, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


def render(
    template: str, plain: Mapping[str, Any], *, may_refuse: Sequence[Mapping[str, Any]] = ()
) -> tuple[str, list[str | None]]:
    """Returns what the template writes with the variables `plain`, and with each of others; TemplateFault.

    Args: may_refuse: variables with which it need not work, but has to end; it has written None where it does not.
    """
    asked = json.dumps({"template": template, "plain": plain, "may_refuse": list(may_refuse)})
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(Path(__file__))],
            input=asked.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TemplateFault(f"it did not end within {LIMIT_S:g} s") from None
    if done.returncode or not done.stdout:
        raise TemplateFault(f"it ended its process ({done.returncode}), as one that needs too much memory or time does")
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise TemplateFault(answer["error"], line=answer["line"])
    return answer["plain"], answer["others"]


def main() -> None:
    """Renders what standard input asks for."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (int(LIMIT_S), int(LIMIT_S) + 1))  # also where the parent was killed
    asked = json.load(sys.stdin)
    try:
        print(json.dumps(_rendered(asked)))
    except MemoryError:
        print(json.dumps({"error": f"it needs more than {MEMORY_BYTES >> 20} MiB of memory", "line": 0}))
    except Exception as error:  # noqa: BLE001 - a template may raise anything, and the parent says it in words
        line = getattr(error, "lineno", None) or 0
        print(json.dumps({"error": str(error) or type(error).__name__, "line": line}))


def _rendered(asked: Mapping[str, Any]) -> dict[str, Any]:
    compiled = environment().from_string(asked["template"])
    plain = _bounded(compiled, asked["plain"])
    others: list[str | None] = []
    for chat in asked["may_refuse"]:
        try:
            others.append(_bounded(compiled, chat))
        except (MemoryError, TemplateFault):
            raise
        except Exception:  # noqa: BLE001 - it need not know tools, for one, and says so in any way it likes
            others.append(None)
    return {"plain": plain, "others": others}


def _bounded(compiled: Any, chat: Mapping[str, Any]) -> str:
    """Returns what a template writes, read part by part, so that what it writes without end fills no memory."""
    parts, length = [], 0
    for part in compiled.generate(**chat):
        parts.append(part)
        length += len(part)
        if length > MAX_CHARACTERS:
            raise TemplateFault(f"it writes more than {MAX_CHARACTERS:,} characters")
    text = "".join(parts)
    text.encode()  # a template may write half of a surrogate pair, which no tokenizer takes
    return text


def environment() -> Any:
    """Returns an environment of jinja like that of transformers."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Reads `{% generation %}`, with which templates mark what assistants say; it writes what is inside."""

        tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def as_json(value: Any, **settings: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **settings})

    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    sandbox.filters["tojson"] = as_json
    sandbox.globals["raise_exception"] = refuse
    sandbox.globals["strftime_now"] = datetime.now().strftime
    return sandbox


if __name__ == "__main__":
    main()
