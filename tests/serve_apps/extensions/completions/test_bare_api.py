"""Models without their chats, with the official client: bare completions, and tokens told and read back."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from gateway_scene import HELLO, Scene

pytestmark = [pytest.mark.test, pytest.mark.anyio]

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
CHAT = {"model": "demo/solver", "messages": HELLO}


async def test_a_model_group_continues_bare_prompts(scene: Scene) -> None:
    tokenizer = scene.streams.tokenizer
    async with scene.openai() as client:
        answer = await client.completions.create(
            model="demo/group/shared",
            prompt=["6*7 =", "1+1 ="],
            max_tokens=20,
            n=2,
            logprobs=1,
            temperature=0.5,
            seed=3,
        )
        assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [
            (i, "It is 42.", "stop") for i in range(4)
        ]
        logprobs = answer.choices[0].logprobs
        assert logprobs and logprobs.token_logprobs and set(logprobs.token_logprobs) == {-0.5}
        assert "".join(logprobs.tokens or []).startswith("It is 42.") and logprobs.text_offset[1] == len(
            logprobs.tokens[0]
        )
        asked = scene.streams.requests
        assert [list(request.prompt_token_ids) for request in asked] == [
            tokenizer.encode(prompt) for prompt in ("6*7 =", "6*7 =", "1+1 =", "1+1 =")
        ]
        assert {request.sampling.temperature for request in asked} == {0.5} and asked[0].seed == asked[2].seed == 3
        assert answer.usage and answer.usage.completion_tokens == 4 * (len(tokenizer.encode("It is 42.")) + 1)
        stream = await client.completions.create(
            model="demo/group/shared", prompt=[7, 8, 9], max_tokens=20, stop=" 42", stream=True
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks) == "It is"
        last = chunks[-1].choices[0]
        assert last.finish_reason == "stop" and last.model_extra == {"stop_reason": " 42"}
        assert list(scene.streams.requests[-1].prompt_token_ids) == [7, 8, 9]
        with pytest.raises(
            openai.BadRequestError, match="for a bare completion ask its model group, demo/group/shared"
        ):
            await client.completions.create(model="demo/solver", prompt="x")
        for wrong, said in (
            ({"prompt": ""}, "there is nothing to continue"),
            ({"prompt": [10**6]}, "prompt has the token 1000000"),
            ({"prompt": "x " * 300}, "maximum context length is 256 tokens"),
            ({"prompt": ["x"] * 9, "n": 2}, "more than 16"),
            ({"prompt": "x", "echo": True}, "echo"),
        ):
            with pytest.raises(openai.BadRequestError, match=said):
                await client.completions.create(model="demo/group/shared", **wrong)  # type: ignore[call-overload]
    assert scene.service.admission.num_in_flight == 0


async def test_tokens_of_chats_and_texts_are_told_and_read_back(scene: Scene) -> None:
    tokenizer = scene.streams.tokenizer
    async with scene.http() as client:
        chat = (await client.post("/tokenize", json=CHAT | {"tools": [ADD]})).json()
        assert chat["tokens"] == tokenizer.encode_chat(HELLO, tools=[ADD]) and chat["max_model_len"] == 256
        text = (
            await client.post(
                "/tokenize", json={"model": "demo/group/shared", "prompt": "6*7", "return_token_strs": True}
            )
        ).json()
        assert text["count"] == len(text["tokens"]) and "".join(text["token_strs"]) == "6*7"
        back = await client.post("/detokenize", json={"model": "demo/solver", "tokens": chat["tokens"]})
        assert back.json() == {"prompt": tokenizer.render_chat(HELLO, tools=[ADD])}
        unknown = await client.post("/detokenize", json={"model": "demo/solver", "tokens": [5, 10**6]})
        assert unknown.status_code == 400 and "tokens has the token 1000000" in unknown.json()["error"]["message"]
        for body in ({"model": "demo/solver"}, CHAT | {"prompt": "x"}):
            both = await client.post("/tokenize", json=body)
            assert both.status_code == 400 and "either prompt or messages" in both.json()["error"]["message"]
