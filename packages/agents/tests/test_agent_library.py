"""An episode of smolagents, which knows nothing of Coupler but an address and a key."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import smolagents
from gateways import RESULTS, recorded

from coupler.conversation import Conversation, Row
from coupler_agents.gateway import Session

CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
TASK = "Say what is behind the door."


class Look(smolagents.Tool):
    name = "look"
    description = "Look at a place."
    inputs = {"at": {"type": "string", "description": "The place."}}  # noqa: RUF012
    output_type = "string"

    def forward(self, at: str) -> str:
        return RESULTS[0][0] if at == "the door" else "nothing"


def episode(*texts: str, steps: int = 4) -> tuple[Any, tuple[Row, ...], Conversation]:
    """Let an agent of the library run to its end, with a policy that says ``texts``."""
    found: list[Any] = []

    async def play(session: Session) -> None:
        model = smolagents.OpenAIServerModel(
            "policy", api_base=session.base_url, api_key=session.api_key
        )
        agent = smolagents.ToolCallingAgent(
            tools=[Look()], model=model, max_steps=steps, verbosity_level=0
        )
        found.append(await asyncio.to_thread(agent.run, TASK))

    rows, conversation = recorded(play, *texts, completion_tokens=4096)
    return found[0], rows, conversation


def called(name: str, **arguments: str) -> str:
    return CALL % (name, json.dumps(arguments))


def test_an_agent_of_a_library_is_recorded_as_it_ran() -> None:
    """It writes calls and results into its history as text of its own, so each turn
    begins a row. Each is trained once.
    """
    said = [called("look", at="the door"), called("final_answer", answer="a door")]
    answer, rows, conversation = episode(*said)
    assert answer == "a door"
    turns = conversation.tree.turns
    assert len(turns) == 2
    sampled = sum(len(turn.completion.tokens) for turn in turns)
    assert sum(len(row.trajectory.sampled) for row in rows) == sampled
    assert len(rows) == 1 + len(conversation.forks) == 2
    assert "content '' became \"Calling tools:" in conversation.forks[0]


def test_a_policy_that_calls_nothing_does_not_end_the_agent() -> None:
    """The library asks again, up to its limit of steps, and then for an answer."""
    answer, rows, conversation = episode("the answer is 3 .", steps=2)
    assert "3" in str(answer)
    assert len(conversation.tree.turns) == 3 and rows
