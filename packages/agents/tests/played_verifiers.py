"""A taskset of verifiers with sums, and a harness that asks twice."""

from __future__ import annotations

from typing import Any

import openai
import verifiers.v1 as vf
from verifiers.v1.clients import ModelContext

__all__ = ["Asks", "Sums"]


class SumData(vf.TaskData):
    right: str
    fails: str = ""
    compacts: bool = False


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        if self.data.fails == "scoring":
            raise ValueError("nobody knows")
        return float(self.data.right in trace.last_reply)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> Any:
        for number in range(4):
            data = SumData(prompt=f"what is {number} + 2 ?", right=str(number + 2))
            yield SumTask(data, self.config.task)


class AsksConfig(vf.HarnessConfig):
    pass


class Asks(vf.Harness[AsksConfig]):
    """Asks the policy twice, in this process."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> vf.ProgramResult:
        if data.fails == "harness":
            return vf.ProgramResult(7, "", "the program is broken")
        history: list[Any] = [{"role": "user", "content": data.prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for _ in range(2):
                made = await client.chat.completions.create(model=ctx.model, messages=history)
                history.append(made.choices[0].message.model_dump(exclude_none=True))
                history.append({"role": "user", "content": "go on"})
                if data.compacts:
                    history = [{"role": "user", "content": "in short"}]
        return vf.ProgramResult(0, "", "")
