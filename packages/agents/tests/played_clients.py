"""Agents that know the official clients alone."""

from __future__ import annotations

from typing import Any

import anthropic
import openai

TURNS = 2


def reward(texts: list[str]) -> float:
    said = "".join(texts)
    return len(set(said)) / (1 + len(said))


async def with_openai(row: dict[str, Any], base_url: str, api_key: str) -> float:
    messages, texts = list(row["messages"]), []
    async with openai.AsyncOpenAI(
        base_url=base_url, api_key=api_key, max_retries=0, timeout=30
    ) as client:
        for _ in range(TURNS):
            try:
                done = await client.chat.completions.create(model="policy", messages=messages)
            except openai.APIStatusError as error:  # the episode has reached a limit
                if error.status_code >= 500:
                    raise
                break
            texts.append(done.choices[0].message.content or "")
            said = {"role": "assistant", "content": texts[-1]}
            messages += [said, {"role": "user", "content": "go"}]
    return reward(texts)


async def with_anthropic(row: dict[str, Any], base_url: str, api_key: str) -> float:
    messages, texts = list(row["messages"]), []
    async with anthropic.AsyncAnthropic(
        base_url=base_url.removesuffix("/v1"), api_key=api_key, max_retries=0, timeout=30
    ) as client:
        for _ in range(TURNS):
            try:
                done = await client.messages.create(
                    model="policy", max_tokens=64, messages=messages
                )
            except anthropic.APIStatusError as error:
                if error.status_code >= 500:
                    raise
                break
            texts.append("".join(part.text for part in done.content if part.type == "text"))
            said = {"role": "assistant", "content": texts[-1] or "-"}
            messages += [said, {"role": "user", "content": "go"}]
    return reward(texts)
