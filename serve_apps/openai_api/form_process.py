"""form_process: `python -m serve_apps.openai_api.form_process`: forms as lines of JSON -> constraints, see `constraints`.

Each form is compiled in a fork of this process, for the tokenizer of its model, by the compiler of vLLM's engines, and some tokens
are chosen under it. A fork has everything loaded, and may be killed.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import selectors
import signal
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from serve_apps.authoring.parsers import Parsers
from serve_apps.chat.tokenizer import load_tokenizer
from serve_apps.openai_api.answer_reader import ThoughtReader, answer_format
from serve_apps.openai_api.chat_request import ChatRequest
from serve_apps.openai_api.constraints import OVERLOADED, constraint_of, constraint_text
from serve_apps.openai_api.protocol import MAX_ECHO, ApiError
from serve_apps.openai_api.tool_formats import OfferedTools
from stores.traces.grammars import compiled, stated

TRIAL_CPU_S = 2
TRIAL_S = 20.0
"""Seconds for a trial on a machine that is busy with others."""
TRIAL_BYTES = 1 << 30
MAX_COMPILED_BYTES = 64 << 20
PLACE = re.compile(r"^\[[0-9:]+\] \S+: ")
"""Time and line of the compiler's source, with which its errors begin."""
NUM_TOKENS = 32
"""Tokens that are chosen under a form."""


def main() -> None:
    """Answers every line of standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        print(json.dumps(answer_for(json.loads(line))), file=answers, flush=True)


def answer_for(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {"constraint"}, or {"error", "code", "param"} where the form is refused, or was not tried: then the code is `OVERLOADED`."""
    try:
        constraint = constraint_for(asked)
    except ApiError as error:
        return {"error": str(error), "code": error.code, "param": error.param}
    except Exception as error:  # noqa: BLE001 - vLLM's formats of calls raise what they like at tools of callers
        fault = str(error)[:MAX_ECHO] or type(error).__name__
        return {"error": f"this form cannot be made: {fault}", "code": "invalid_value", "param": None}
    try:
        fault = _tried(asked["tokenizer"], constraint)
    except TimeoutError as late:
        return {"error": str(late), "code": OVERLOADED, "param": None}
    if fault:
        return {"error": f"this form cannot be used: {fault}: simplify it", "code": "invalid_value", "param": None}
    return {"constraint": constraint}


def constraint_for(asked: Mapping[str, Any]) -> str:
    """Returns the constraint of {"tokenizer": model folder, "parsers", "thoughts", "request": the fields of a chat that say its form}."""
    tokenizer = load_tokenizer(asked["tokenizer"])
    chat = {"model": "m", "messages": [{"role": "user", "content": ""}]}
    request = ChatRequest.model_validate(chat | asked["request"])
    form = answer_format(tokenizer, Parsers(**asked["parsers"]))
    tools = OfferedTools(
        tokenizer=tokenizer,
        format=form.tools,
        tools=request.callable_tools,
        is_single=not request.parallel_tool_calls,
    )
    thoughts = ThoughtReader(marks=form.thoughts, thoughts=asked["thoughts"])
    return constraint_text(constraint_of(request, tools, thoughts), tokenizer)


def _tried(folder: str, constraint: str) -> str:
    """Returns why a constraint cannot be used; empty where it can."""
    form, *_ = stated(constraint)
    _vocabulary(folder)
    return _in_a_fork(lambda: _compile(folder, form))


def _compile(folder: str, form: Mapping[str, Any]) -> str:
    import numpy as np
    import xgrammar

    vocabulary = _vocabulary(folder)
    compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)
    try:
        grammar = compiled(compiler, form)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - the compiler has several kinds of errors, and each is a fault of the form
        return PLACE.sub("", str(error).strip())[:MAX_ECHO] or type(error).__name__
    if grammar.memory_size_bytes > MAX_COMPILED_BYTES:
        return f"compiled it needs {grammar.memory_size_bytes >> 20} MiB, and at most {MAX_COMPILED_BYTES >> 20} are accepted"
    matcher, dice = xgrammar.GrammarMatcher(grammar), random.Random(0)
    bitmask = xgrammar.allocate_token_bitmask(1, vocabulary.vocab_size)
    for _ in range(NUM_TOKENS):
        matcher.fill_next_token_bitmask(bitmask)
        bits = np.unpackbits(bitmask.numpy().view(np.uint8), bitorder="little")[: vocabulary.vocab_size]
        allowed = np.flatnonzero(bits)
        if not len(allowed) or not matcher.accept_token(int(dice.choice(allowed))) or matcher.is_terminated():
            break
    return ""


@lru_cache(maxsize=16)  # as tokenizers: each version of a training has a folder of its own
def _vocabulary(folder: str) -> Any:
    import xgrammar

    return xgrammar.TokenizerInfo.from_huggingface(load_tokenizer(folder).hugging_face)


def _in_a_fork(work: Callable[[], str]) -> str:
    """Returns what `work` returns in a fork of this process, or that it took too much; TimeoutError where the machine had no time for it."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            _limit()
            os.write(writing, b"." + work().encode("utf-8", "replace"))
        except MemoryError:
            os.write(writing, f".it needs more than {TRIAL_BYTES >> 20} MiB".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with selectors.DefaultSelector() as selector:
        selector.register(reading, selectors.EVENT_READ)
        has_ended = bool(selector.select(TRIAL_S))
        got = os.read(reading, 8 * MAX_ECHO) if has_ended else b""
    os.close(reading)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not has_ended:  # `TRIAL_CPU_S` ends a form that is to blame itself
        raise TimeoutError(f"the form was not tried within {TRIAL_S:g} s, this machine is too busy: try again later")
    if got:
        return got[1:].decode()
    signals = {signal.SIGXCPU, signal.SIGKILL}
    is_slow = os.WIFSIGNALED(status) and os.WTERMSIG(status) in signals
    return f"it takes more than {TRIAL_CPU_S} s to compile" if is_slow else "its compiler does not survive it"


def _limit() -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + TRIAL_BYTES, size + TRIAL_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (TRIAL_CPU_S, TRIAL_CPU_S + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
