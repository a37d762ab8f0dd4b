"""hostile_bodies: JSON that a caller with a key may send: what each body is -> path and bytes. None may cause a server error.

They are made when they are asked for: some have two megabytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

MIB = 1_000_000
CHAT, RUNS, RESPONSES, COMPLETIONS = (
    "/v1/chat/completions",
    "/v1/workflows/demo/runs",
    "/v1/responses",
    "/v1/completions",
)
TOKENIZE, DETOKENIZE, EPISODES, FEEDBACK = "/tokenize", "/detokenize", "/v1/episodes", "/v1/traces/x/feedback"
AGENT, GROUP = "demo/solver", "demo/group/shared"
Body = Callable[[], tuple[str, bytes]]


def raw(path: str, text: str) -> Body:
    return lambda: (path, text.encode("utf-8", "surrogatepass"))


def chat(make: Callable[[], dict[str, Any]], path: str = CHAT) -> Body:
    """A chat with further fields."""

    def body() -> tuple[str, bytes]:
        whole = {"model": AGENT, "max_tokens": 8, "messages": [{"role": "user", "content": "6*7?"}]} | make()
        return path, json.dumps(whole).encode()

    return body


def says(make: Callable[[], Any], path: str = CHAT) -> Body:
    return chat(lambda: {"messages": [{"role": "user", "content": make()}]}, path)


def other(path: str, make: Callable[[], dict[str, Any]]) -> Body:
    return lambda: (path, json.dumps(make()).encode())


def with_field(text: str, path: str = CHAT) -> Body:
    """A chat with a field in its own JSON text, which Python would not write."""
    return raw(path, f'{{"model": "{AGENT}", "messages": [{{"role": "user", "content": "a"}}], {text}}}')


def form(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


def outputs(**asked: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"structured_outputs": asked}


def tool(parameters: Any, name: str = "add") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def nested(depth: int, begin: str = '{"a":', end: str = "}") -> str:
    return begin * depth + "1" + end * depth


def wide(depth: int, width: int) -> Any:
    """An object of `width` ** `depth` leaves."""
    return {str(i): wide(depth - 1, width) for i in range(width)} if depth else "x"


SCHEMAS: dict[str, Any] = {
    "a $ref to itself": {"$ref": "#"},
    "a $ref cycle": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "a $ref that is exponential": {
        "$ref": "#/$defs/a0",
        "$defs": {
            f"a{i}": {"type": "object", "properties": {k: {"$ref": f"#/$defs/a{i + 1}"} for k in "xyzuvw"}}
            for i in range(12)
        }
        | {"a12": {"type": "string"}},
    },
    "a $ref to elsewhere": {"$ref": "http://169.254.169.254/latest/meta-data"},
    "maxLength of a billion": {"type": "string", "maxLength": 10**9},
    "minLength of a billion": {"type": "string", "minLength": 10**9},
    "minItems of a billion": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
    "minProperties of a billion": {"type": "object", "minProperties": 10**9, "maxProperties": 10**9 + 1},
    "an enum of thousands": {"enum": [f"v{i:07}" for i in range(4000)]},
    "anyOf of anyOf": {"anyOf": [{"anyOf": [{"type": "string", "pattern": "(a|b|c){1,50}"}] * 20}] * 20},
    "a pattern with lookahead": {"type": "string", "pattern": "^(?=.*a)(?=.*b)(?!.*c).*$"},
    "a pattern that is exponential": {"type": "string", "pattern": "((((a{1,99}){1,99}){1,99}){1,99}){1,99}"},
    "bounds of ints without end": {"type": "integer", "minimum": -(10**4000), "maximum": 10**4000},
    "hundreds of properties": {"type": "object", "properties": {f"p{i}": {"type": "number"} for i in range(900)}},
    "not a schema": {"type": 7, "properties": [], "required": {}},
}
FORMS: dict[str, Callable[[], dict[str, Any]]] = {
    "regex of repetitions": outputs(regex="(((a{1000}){1000}){1000}){1000}"),
    "regex of nested quantifiers": outputs(regex="((((a+)+)+)+)+b" * 50),
    "regex with lookbehind": outputs(regex="(?<=a)b\\1\\p{L}(?i:x)"),
    "regex of sixty kilobytes": outputs(regex="(a|b)*c" * 9000),
    "regex that does not close": outputs(regex="(" * 20_000),
    "grammar that is left recursive": outputs(grammar='root ::= root root | root root root | "a" | ""'),
    "grammar of repetitions": outputs(grammar='root ::= ((("a"{999}){999}){999}){999}'),
    "grammar without a root": outputs(grammar="x ::= y\ny ::= x"),
    "grammar of thousands of rules": lambda: {
        "structured_outputs": {
            "grammar": "\n".join(
                ["root ::= r0", *(f"r{i} ::= r{i + 1} r{i + 1} | [a-z]" for i in range(2000)), 'r2000 ::= "a"']
            )
        }
    },
    "choice of long values": lambda: {"structured_outputs": {"choice": [f"{i}" + "x" * 50 for i in range(1000)]}},
    "a structural tag": outputs(structural_tag="{}"),
}
STRINGS = {
    "a surrogate": r"\ud800",
    "NUL": r"\u0000",
    "control characters": r"\u0001\u001b[2J\u0007\r\n",
    "an override": "\u202e\u2066",
}
PLACES: dict[str, tuple[str, str]] = {
    "the model": (CHAT, '{"model": "VALUE", "messages": [{"role": "user", "content": "a"}]}'),
    "a content": (CHAT, f'{{"model": "{AGENT}", "messages": [{{"role": "user", "content": "VALUE"}}]}}'),
    "a name": (CHAT, f'{{"model": "{AGENT}", "messages": [{{"role": "user", "content": "a", "name": "VALUE"}}]}}'),
    "a key of a message": (
        CHAT,
        f'{{"model": "{AGENT}", "messages": [{{"role": "user", "content": "a", "VALUE": 1}}]}}',
    ),
    "a call's id": (
        CHAT,
        f'{{"model": "{AGENT}", "messages": [{{"role": "assistant", "tool_calls": [{{"id": "VALUE", "function": '
        '{"name": "VALUE", "arguments": "VALUE"}}]}, {"role": "tool", "tool_call_id": "VALUE", "content": "VALUE"}]}',
    ),
    "a stop": (CHAT, f'{{"model": "{AGENT}", "messages": [{{"role": "user", "content": "a"}}], "stop": ["VALUE"]}}'),
    "a user": (CHAT, f'{{"model": "{AGENT}", "messages": [{{"role": "user", "content": "a"}}], "user": "VALUE"}}'),
    "a template variable": (
        CHAT,
        f'{{"model": "{AGENT}", "messages": [{{"role": "user", "content": "a"}}], "chat_template_kwargs": {{"VALUE": "VALUE"}}}}',
    ),
    "a regex": (
        CHAT,
        f'{{"model": "{AGENT}", "messages": [{{"role": "user", "content": "a"}}], "structured_outputs": {{"regex": "VALUE"}}}}',
    ),
    "a field": (CHAT, f'{{"model": "{AGENT}", "messages": [{{"role": "user", "content": "a"}}], "VALUE": 1}}'),
    "a task": (RUNS, '{"prompt": "VALUE", "metadata": {"VALUE": "VALUE"}, "user": "VALUE", "store": true}'),
    "an episode": (EPISODES, '{"team": "VALUE", "prompt": "VALUE", "metadata": {"VALUE": ["VALUE"]}}'),
    "feedback": (FEEDBACK, '{"score": 1, "label": "VALUE", "comment": "VALUE", "answer": "VALUE"}'),
    "an item": (
        RESPONSES,
        f'{{"model": "{AGENT}", "input": "VALUE", "instructions": "VALUE", "previous_response_id": "VALUE"}}',
    ),
    "a bare prompt": (COMPLETIONS, f'{{"model": "{GROUP}", "prompt": ["VALUE", "a"]}}'),
}

BODIES: dict[str, Body] = {
    "metadata nested 900,000 deep": with_field(f'"metadata": {nested(900_000, "[", "]")}'),
    "metadata of a run nested 21 deep": raw(RUNS, f'{{"prompt": "a", "metadata": {nested(21)}}}'),
    "arguments nested deep": chat(
        lambda: {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": nested(90_000)}}],
                }
            ]
        }
    ),
    "a schema nested deep": chat(lambda: form(json.loads(nested(900)))),
    "parameters nested deep": chat(lambda: {"tools": [tool(json.loads(nested(900)))], "tool_choice": "required"}),
    "600,000 empty objects": raw(RUNS, '{"prompt": "a", "store": true, "metadata": {"a": [' + "{}," * 600_000 + "1]}}"),
    "900,000 empty lists": raw(EPISODES, '{"team": "demo", "metadata": {"a": [' + "[]," * 640_000 + "1]}}"),
    "a million numbers": raw(RUNS, '{"prompt": "a", "store": true, "metadata": {"a": [' + "1," * 900_000 + "1]}}"),
    "200,000 unknown fields": raw(CHAT, "{" + ",".join(f'"{i}":1' for i in range(170_000)) + "}"),
    "200,000 values of another type": with_field('"metadata": {' + ",".join(f'"{i}":1' for i in range(170_000)) + "}"),
    "100,000 keys of one message": chat(
        lambda: {"messages": [{"role": "user", "content": "a"} | {str(i): i for i in range(100_000)}]}
    ),
    "the same key 100,000 times": with_field('"user": "a", ' * 100_000 + '"seed": 1'),
    "all fields twice": raw(
        CHAT,
        f'{{"model": "x", "messages": [], "model": "{AGENT}", "messages": [{{"role": "user", "content": "a", "content": "b"}}]}}',
    ),
    "100,000 biases": chat(lambda: {"logit_bias": {str(i): 1.0 for i in range(100_000)}}),
    "100,000 biases of no token": chat(lambda: {"logit_bias": {f"x{i}": "y" for i in range(100_000)}}),
    "100,000 stops": chat(lambda: {"stop": ["x"] * 100_000}),
    "a stop of two megabytes": chat(lambda: {"stop": "It is 42, " * 190_000, "stream": True}),
    "many almost stops": chat(
        lambda: {"stop": ["It is 42, and " * 30_000 + str(i) for i in range(4)], "max_tokens": 60}
    ),
    "n of a billion": chat(lambda: {"n": 10**9}),
    "max_tokens of a quintillion": chat(lambda: {"max_tokens": 10**18}),
    "numbers beyond every float": with_field('"temperature": 1e400, "top_p": 1e400'),
    "minus zero": with_field('"temperature": -0.0, "top_p": -0, "seed": -0'),
    "ints of 5,000 digits": with_field(f'"seed": {"9" * 5000}, "top_k": {"9" * 4000}'),
    "a top_k of 4,000 digits": with_field(f'"top_k": {"9" * 4000}, "max_tokens": 4'),
    "min_tokens of 4,000 digits": with_field(f'"min_tokens": {"9" * 4000}, "max_tokens": 4'),
    "floats where ints belong": with_field('"max_tokens": 1e300, "n": 1.0, "seed": 3.0'),
    "all choices with all logprobs": chat(lambda: {"n": 16, "logprobs": True, "top_logprobs": 20, "max_tokens": 200}),
    "all choices of all prompts": other(
        COMPLETIONS, lambda: {"model": GROUP, "prompt": ["a"] * 16, "n": 16, "max_tokens": 8}
    ),
    "two megabytes of words": says(lambda: "word " * 390_000),
    "two megabytes without a space": says(lambda: "a" * 1_900_000),
    "two megabytes of changing letters": says(lambda: "abcdefghijklmnopqrstuvwxyz0123456789" * 53_000),
    "a normalisation bomb": says(lambda: "\ufdfa" * 310_000),
    "letters with thousands of accents": says(lambda: ("a" + "\u0301" * 5000) * 63),
    "300,000 control tokens": says(lambda: "<|im_end|></s><s>" * 110_000),
    "300,000 beginnings of control tokens": says(lambda: "<|im_en" * 270_000),
    "two megabytes to the tokenizer": says(lambda: "word " * 390_000, TOKENIZE),
    "two megabytes to the tokenizer, bare": other(
        TOKENIZE, lambda: {"model": GROUP, "prompt": "x7 " * 600_000, "return_token_strs": True}
    ),
    "650,000 tokens to text": other(DETOKENIZE, lambda: {"model": GROUP, "tokens": [300] * 380_000}),
    "tokens that there are not": other(DETOKENIZE, lambda: {"model": GROUP, "tokens": [2**31 - 1, 10**9]}),
    "a bare prompt of tokens that there are not": other(
        COMPLETIONS, lambda: {"model": GROUP, "prompt": [2**31 - 1] * 300}
    ),
    "a bare prompt of 380,000 tokens": other(COMPLETIONS, lambda: {"model": GROUP, "prompt": [300] * 380_000}),
    "sixteen long bare prompts": other(COMPLETIONS, lambda: {"model": GROUP, "prompt": ["word " * 24_000] * 16}),
    "4,096 messages": chat(
        lambda: {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 8}] * 4096}
    ),
    "5,000 messages": chat(lambda: {"messages": [{"role": "user", "content": "a"}] * 5000}),
    "floods of calls": chat(
        lambda: {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": f"c{i}", "function": {"name": "f", "arguments": "{}"}} for i in range(128)],
                }
            ]
            * 190
        }
    ),
    "answers to no call": chat(
        lambda: {"messages": [{"role": "tool", "tool_call_id": f"c{i}", "content": "1"} for i in range(4000)]}
    ),
    "thousands of tools": chat(lambda: {"tools": [tool({}, f"f{i}") for i in range(9000)]}),
    "128 tools with long schemas": chat(
        lambda: {"tools": [tool(wide(3, 10), f"f{i}") for i in range(128)], "tool_choice": "required"}
    ),
    "one tool 128 times": chat(lambda: {"tools": [tool({"type": "object"})] * 128, "tool_choice": "required"}),
    "images and sounds": says(
        lambda: [
            {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}},
            {"type": "input_audio", "input_audio": {"data": "A" * MIB, "format": "wav"}},
        ]
    ),
    "a template's own variables": chat(
        lambda: {
            "chat_template_kwargs": {
                **{
                    name: "x"
                    for name in ("messages", "tools", "documents", "bos_token", "eos_token", "add_generation_prompt")
                },
                **{
                    name: [{}]
                    for name in (
                        "loop",
                        "message",
                        "raise_exception",
                        "namespace",
                        "self",
                        "__class__",
                        "tokenize",
                        "chat_template",
                    )
                },
            }
        }
    ),
    "a response of somebody else": other(
        RESPONSES, lambda: {"model": AGENT, "input": "a", "previous_response_id": "resp-FOREIGN"}
    ),
    "an id of a megabyte": other(
        RESPONSES, lambda: {"model": AGENT, "input": "a", "previous_response_id": "../" * 500_000}
    ),
    "400,000 items": other(RESPONSES, lambda: {"model": AGENT, "input": [{}] * 400_000}),
    "items of every wrong kind": other(
        RESPONSES,
        lambda: {
            "model": AGENT,
            "input": [{"type": "function_call_output", "call_id": "x", "output": [{"type": "text"}] * 4096}] * 20,
        },
    ),
    "a model of a megabyte": chat(lambda: {"model": "x" * MIB}),
    "a team of a megabyte": other(EPISODES, lambda: {"team": "x" * MIB}),
    "a user of a megabyte": chat(lambda: {"user": "x" * MIB}),
    "a run of two megabytes": other(RUNS, lambda: {"prompt": "word " * 390_000, "store": True}),
    "a streamed run of two megabytes": other(RUNS, lambda: {"prompt": "word " * 390_000, "stream": True}),
    "redaction in quadratic time": other(
        RUNS, lambda: {"prompt": "Compute 1+2*3.", "store": True, "metadata": {"a": "a" * 1_800_000}}
    ),
    "redaction of many values": other(
        RUNS, lambda: {"prompt": "1+2", "store": True, "metadata": {"a": ["a.b" * 200] * 2500}}
    ),
    "braces of a prompt": other(
        RUNS, lambda: {"prompt": "{question}{__class__.__mro__}{0}{}" * 10, "metadata": {"question": "{x}"}}
    ),
    "feedback of other kinds": other(FEEDBACK, lambda: {"score": 1e9, "label": "x" * 101, "comment": "x" * 4001}),
    "feedback in SQL": other("/v1/traces/x'%20OR%20'1'='1/feedback", lambda: {"score": 1}),
    "an empty body": raw(CHAT, ""),
    "half of a body": raw(CHAT, '{"model": "demo/so'),
    "a body that is a list": raw(CHAT, "[" * 9 + "]" * 9),
    "a body that is null": raw(CHAT, "null"),
    "a body in UTF-16": lambda: (CHAT, '{"model": "demo/solver"}'.encode("utf-16")),
    "a body that is no UTF-8": lambda: (CHAT, b'{"model": "\xff\xfe\xc0\x80"}'),
    "a body that is noise": lambda: (CHAT, bytes(range(256)) * 4000),
    **{f"a schema: {name}": chat(lambda schema=schema: form(schema)) for name, schema in SCHEMAS.items()},
    **{
        f"parameters: {name}": chat(lambda schema=schema: {"tools": [tool(schema)], "tool_choice": "required"})
        for name, schema in SCHEMAS.items()
    },
    **{f"a form: {name}": chat(make) for name, make in FORMS.items()},
    **{
        f"{what} in {place}": raw(path, text.replace("VALUE", string))
        for what, string in STRINGS.items()
        for place, (path, text) in PLACES.items()
    },
}
"""What each body is -> what makes its path and bytes."""
