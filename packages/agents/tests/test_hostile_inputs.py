"""At least 200 hostile inputs: answers, tool calls, programs, histories and requests.

Nothing runs outside the sandbox, nothing earns a reward that an honest run would not
give, and what was attacked serves an honest episode or request afterwards. The tables
are in the files ``hostile_*.py``.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import gateways
import httpx
import pytest
from gateways import check_error, client_of, codec, raw, renderer, run, serving, still_works, talk
from hostile_answers import ANSWERS, CANARY, LAST_WORDS, call, python, tagged
from hostile_programs import PROGRAMS, SECRET
from hostile_requests import (
    ASK,
    BODIES,
    HISTORIES,
    NO_REQUEST,
    PATHS,
    REFUSED,
    USER,
    heads,
    keys,
)
from playing import TASK, TOOLS

from coupler.conversation import Codec, Conversation, Limits, TemplateRenderer
from coupler.interfaces import Model, Outcome, Request
from coupler.rewards.value import judged
from coupler.testing.conversations import Scripted, check_rows
from coupler.testing.environments import set_up
from coupler.testing.models import write_tokenizer
from coupler_agents.gateway import Bounds
from coupler_agents.program.process import outcome_of
from coupler_agents.sandbox.parent import why_none
from coupler_agents.tools.config import CallFormat, ToolsConfig
from coupler_agents.tools.environment import ToolEnvironment

WANTED = 200
AT_ONCE = 4
PLACES = ("/", "/srv", "/tmp", "/var/tmp", ".", str(Path.home()))
TAGS = (
    "<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}"
    "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>"
)
sandboxed = pytest.mark.skipif(bool(why_none()), reason=why_none())


def test_there_are_enough_and_no_two_are_equal() -> None:
    own, dead = "own" * 15, "dead" * 11
    found = [
        *ANSWERS.values(),
        *LAST_WORDS.values(),
        *(code for code, _ in PROGRAMS.values()),
        *map(repr, HISTORIES.values()),
        *(repr((path, more)) for path, more, _ in REFUSED),
        *(repr(raw) for raw, _ in NO_REQUEST),
        *map(repr, heads(own).values()),
        *map(repr, keys(own, dead).values()),
    ]
    assert len(set(found)) == len(found) >= WANTED, len(found)


@cache
def renderer_of(notation: str) -> tuple[Codec, TemplateRenderer | None]:
    """Return the codec of a chat template, and its renderer."""
    if notation != "tags":
        return codec(), renderer()
    folder = Path(mkdtemp())
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(
        gateways.TEMPLATE.replace("<tool_call>\n{{ c.function | tojson }}\n</tool_call>", TAGS)
    )
    made = Codec(Model(str(folder)))
    return made, TemplateRenderer(made, tools=True)


class Game:
    """Episodes of a game with the secret 3, and with Python as a tool."""

    def __init__(self, notation: str) -> None:
        self.codec, self.renderer = renderer_of(notation)
        self.notation = notation
        self.environment = ToolEnvironment(
            ToolsConfig(
                target=f"{TOOLS}:Guess",
                builtin=[] if why_none() else ["python"],
                calls=CallFormat.TEXT if notation == "text" else CallFormat.TEMPLATE,
                call_timeout_s=1.0,
                sandbox_memory_gib=0.5,
                sandbox_files_mib=16,
            )
        )

    async def play(self, says: Sequence[str], control_tokens: bool = False) -> tuple[Outcome, str]:
        """Play an episode, and return its outcome with the last prompt."""
        left = [self.codec.target_ids(text, control_tokens=control_tokens) for text in says]
        rollout = Scripted(lambda _: left.pop(0) if len(left) > 1 else left[0])
        limits = Limits(1 << 16, turns=4)
        conversation = Conversation(rollout, self.renderer, limits, Request((), 1, 1.0, seed=7))
        async with asyncio.timeout(20):
            outcome = await self.environment.episode(TASK, conversation)
        check_rows(conversation.close(), rollout.answered)
        return outcome, self.codec.tokenizer.decode(rollout.requests[-1].prompt)

    async def honest(self) -> None:
        """Play an honest episode, whose reward is that of an honest run."""
        write = call("guess", {"number": 3})
        if self.notation == "tags":
            write = tagged("guess", "<parameter=number>\n3\n</parameter>")
        outcome, _ = await self.play([write, "it is 3"])
        assert outcome.reward == 1.0


@asynccontextmanager
async def game(notation: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Game]:
    """A game that is still played honestly in the end, and left nothing outside."""
    monkeypatch.setenv("COUPLER_KEY", SECRET)
    made = Game(notation)
    async with set_up(made.environment):
        yield made
        await made.honest()
    found = [place for place in PLACES if os.path.exists(os.path.join(place, CANARY))]
    assert not found, f"a program wrote outside the sandbox: {found}"


@pytest.mark.parametrize("notation", ["text", "json", "tags"])
def test_no_answer_earns_a_reward(notation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with game(notation, monkeypatch) as played:
            for number, (name, text) in enumerate(ANSWERS.items()):
                for control_tokens in (False, True):
                    outcome, shown = await played.play([text, text, "done"], control_tokens)
                    assert outcome.reward == 0.0, name
                    assert SECRET not in shown, name
                if number % 10 == 0:
                    await played.honest()

    run(story())


@sandboxed
def test_no_program_of_an_episode_earns_a_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some run at once, and honest episodes beside them."""

    async def story() -> None:
        places = asyncio.Semaphore(AT_ONCE)

        async def hostile(played: Game, name: str, code: str) -> None:
            async with places:
                outcome, shown = await played.play([python(code), python("6 * 7"), "done"])
                assert outcome.reward == 0.0, name
                assert SECRET not in shown, name
                await played.honest()

        async with game("text", monkeypatch) as played:
            await asyncio.gather(
                *(hostile(played, name, code) for name, (code, _) in PROGRAMS.items())
            )

    run(story())


@pytest.mark.parametrize("name", LAST_WORDS)
def test_no_last_word_is_a_reward(name: str) -> None:
    outcome = outcome_of(f"it went well\n{LAST_WORDS[name]}\n")
    assert outcome.reward is None and not outcome.metrics
    assert outcome_of("0.5").reward == 0.5
    assert judged(0.5, "").result == 0.5


def control(prompt: Sequence[int]) -> list[int]:
    """Return the ids that begin and end turns."""
    marks = codec().tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    return [id for id in prompt if id in marks]


def test_no_history_speaks_for_another() -> None:
    """Each message has one beginning and one end, and what clients say for the policy
    is not trained.
    """

    async def story() -> None:
        answered = 0
        async with serving() as gateway:
            for name, messages in HISTORIES.items():
                conversation, rollout = talk("3")
                session = gateway.open(conversation)
                async with client_of(session) as client:
                    answer = await client.post(
                        PATHS[0], content=json.dumps({"model": "policy", "messages": messages})
                    )
                    assert answer.status_code in (200, 400), (name, answer.text[:300])
                    if answer.status_code == 400:
                        check_error(answer, PATHS[0])
                        assert not rollout.requests, name
                    else:
                        answered += 1
                        found = control(rollout.requests[0].prompt)
                        assert len(found) == 2 * len(messages) + 1, name
                assert session.failure is None, name
                await still_works(session)
                check_rows(conversation.close(), rollout.answered)
        assert answered >= 20

    run(story())


def test_no_body_gets_a_turn() -> None:
    conversation, rollout = talk("3")
    bodies = [(path, json.dumps(BODIES[path] | more).encode()) for path, more, _ in REFUSED]
    bodies += [(path, content) for content, _ in NO_REQUEST for path in PATHS]

    async def story() -> None:
        async with serving() as gateway:
            session = gateway.open(conversation)
            async with client_of(session) as client:
                for path, content in bodies:
                    answer = await client.post(path, content=content)
                    assert answer.status_code in (400, 404), (path, content[:200])
                    check_error(answer, path)
            assert not rollout.requests and session.failure is None
            await still_works(session)

    run(story())


def test_no_head_gets_a_turn() -> None:
    """Malformed, cut, slow, large and smuggled requests."""
    conversation, rollout = talk("3")
    other, untouched = talk("3")

    async def story() -> None:
        async with serving(Bounds(receive_seconds=0.3, idle_seconds=0.4)) as gateway:
            session, beside = gateway.open(conversation), gateway.open(other)

            async def hostile(name: str, parts: tuple[bytes, ...]) -> None:
                pause = 0.1 if len(parts) > 1 else 0.0
                answer = await raw(session, *parts, pause=pause)
                statuses = [line for line in answer.split(b"\r\n") if line.startswith(b"HTTP/")]
                assert all(line.split()[1][:1] in b"45" for line in statuses), (name, answer)
                assert b"Traceback" not in answer and not answer.count(b" 500 "), (name, answer)

            found = heads(session.api_key)
            await asyncio.gather(*(hostile(name, parts) for name, parts in found.items()))
            assert not rollout.requests and not untouched.requests
            assert session.failure is None
            await still_works(session)
            await still_works(beside)

    run(story())


def test_no_key_but_its_own_opens_an_episode() -> None:
    conversation, rollout = talk("3")
    ended, _ = talk("3")

    async def story() -> None:
        async with serving() as gateway:
            session, dead = gateway.open(conversation), gateway.open(ended)
            key = dead.api_key
            gateway.end(dead)
            async with httpx.AsyncClient(base_url=gateway.url) as client:
                for name, headers in keys(session.api_key, key).items():
                    for path in PATHS:
                        answer = await client.post(path, json=BODIES[path], headers=headers)
                        wanted = 410 if name.startswith("dead") else 401
                        assert answer.status_code == wanted, (name, path)
                        check_error(answer, path)
                answer = await client.post(f"{PATHS[0]}?api_key={session.api_key}", json=ASK)
                assert answer.status_code == 401
            assert not rollout.requests
            await still_works(session)

    run(story())


def test_the_key_of_another_episode_opens_that_one_alone() -> None:
    """What its holder says is in no row of the other."""
    one, two = talk("3"), talk("3")

    async def story() -> None:
        async with serving() as gateway:
            mine, theirs = gateway.open(one[0]), gateway.open(two[0])
            async with client_of(mine) as client:
                for headers in ({"X-Session-ID": "x"}, {"X-Api-Key": "x"}, {"Cookie": "a=b"}):
                    answer = await client.post(PATHS[0], json=ASK, headers=headers)
                    assert answer.status_code == 200
                made = await client.post(PATHS[1], json={"model": "policy", "input": [USER]})
            async with client_of(theirs) as client:
                again = {"model": "policy", "input": "a", "previous_response_id": made.json()["id"]}
                assert (await client.post(PATHS[1], json=again)).status_code == 404
            assert len(one[1].requests) == 4 and not two[1].requests
            await still_works(theirs)

    run(story())
