"""Give the policy a tool that runs Python, with state over the calls of an episode."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from coupler.errors import ConfigError
from coupler_agents.sandbox import (
    Answer,
    Interpreter,
    InterpreterLost,
    Ran,
    Sandbox,
    SandboxLimits,
)
from coupler_agents.sandbox.fusion import check_url, run_at
from coupler_agents.sandbox.parent import why_none
from coupler_agents.sandbox.ran import check_files
from coupler_agents.tools.calling import ToolFailed
from coupler_agents.tools.config import ToolsConfig

FIX = "apt-get install bubblewrap, or environment.sandbox_url=http://HOST:PORT"
WHERE = "tools_kwargs.python.create_kwargs.files"
# Bytes of output that are kept for each character that the policy may be shown.
BYTES = 4


class PythonTool:
    """Own what the Python tools of all episodes share.

    Raises:
        ConfigError: there is no sandbox here, and no URL of one.
    """

    def __init__(self, config: ToolsConfig) -> None:
        self.config, self.url = config, config.sandbox_url
        self.limits = SandboxLimits(
            memory_gib=config.sandbox_memory_gib,
            processes=config.sandbox_processes,
            files_mib=config.sandbox_files_mib,
            interpreters=config.sandbox_interpreters,
            imports=tuple(config.sandbox_imports),
            output_bytes=BYTES * config.max_result_characters,
        )
        self.sandbox: Sandbox | None = None

        if self.url:
            check_url(self.url, "environment.sandbox_url")
        elif why := why_none():
            raise ConfigError(
                "environment.builtin=[python] runs what the model writes in a sandbox, and there "
                f"is none here ({why}).\n  try:  {FIX}"
            )

    @property
    def described(self) -> Callable[..., Any]:
        """The function whose signature and docstring the policy is shown."""
        return RemotePrograms.python if self.url else Programs.python

    async def start(self, threads: ThreadPoolExecutor) -> None:
        """Start the sandbox."""
        self.threads = threads
        if not self.url:
            self.sandbox = Sandbox(self.limits)
            await self.sandbox.start()

    async def close(self) -> None:
        """End the sandbox, with all interpreters."""
        if self.sandbox:
            await self.sandbox.close()

    def episode(self, kwargs: Mapping[str, Any]) -> Programs | RemotePrograms:
        """Return the tool of one episode.

        Args:
            kwargs: ``tools_kwargs.python`` of the row.

        Raises:
            SandboxFailed: the files of the row cannot be given to a program.
        """
        files = check_files((kwargs.get("create_kwargs") or {}).get("files") or {}, WHERE)
        return RemotePrograms(self, files) if self.url else Programs(self, files)


class Programs:
    """Run the programs of one episode in one interpreter."""

    def __init__(self, tool: PythonTool, files: dict[str, str]) -> None:
        self.tool, self.files = tool, files
        self.interpreter: Interpreter | None = None
        # Calls of one turn come side by side, and share one interpreter.
        self.turn = asyncio.Lock()

    async def python(self, code: str) -> str:
        """Run Python code. Returns what it prints, and the value of a last expression.

        Variables, imports and files are kept for later calls. There is no network.

        Args:
            code: The code to run.
        """
        if not isinstance(code, str):
            raise ToolFailed("the code is no text.")

        async with self.turn:
            files = {} if self.interpreter else self.files
            if not self.interpreter:
                assert self.tool.sandbox
                self.interpreter = await self.tool.sandbox.interpreter()
            try:
                seconds = self.tool.config.call_timeout_s
                answer = await self.interpreter.call(code, seconds, files)
                return _shown(answer, self.tool.config.max_result_characters)
            except InterpreterLost as lost:
                raise ToolFailed(_told(lost), timed_out=lost.timed_out) from None
            finally:
                if self.interpreter.closed:
                    self.interpreter = None

    python.bounds_its_time = True  # type: ignore[attr-defined]

    async def close(self) -> None:
        """End the interpreter."""
        if self.interpreter:
            await self.interpreter.close()


class RemotePrograms:
    """Run the programs of one episode at a URL, each alone."""

    def __init__(self, tool: PythonTool, files: dict[str, str]) -> None:
        self.tool, self.files = tool, files

    async def python(self, code: str) -> str:
        """Run a Python program, and return what it prints.

        Every program starts anew, without the variables and files of earlier ones.

        Args:
            code: The program to run.
        """
        if not isinstance(code, str):
            raise ToolFailed("the code is no text.")
        loop = asyncio.get_running_loop()
        ran = await loop.run_in_executor(self.tool.threads, self._run, code)
        text = "\n".join(part.rstrip("\n") for part in (ran.stdout, ran.stderr) if part)
        if ran.timed_out:
            seconds = self.tool.config.call_timeout_s
            raise ToolFailed(f"the program took longer than {seconds:g} seconds.", timed_out=True)
        return text if text or not ran.code else f"The program exited with code {ran.code}."

    python.bounds_its_time = True  # type: ignore[attr-defined]

    def _run(self, code: str) -> Ran:
        tool = self.tool
        return run_at(
            tool.url,
            code,
            timeout_s=tool.config.call_timeout_s,
            files=self.files,
            stdin="",
            fetch=(),
            limits=tool.limits,
        )

    async def close(self) -> None:
        """Do nothing: the server keeps nothing of an episode."""


def _shown(answer: Answer, limit: int) -> str:
    """Return a call as text, with a value or traceback first where its end is cut."""
    result = answer.value or answer.error
    if len(answer.text) <= limit or not result:
        return answer.text
    return f"{result.rstrip()}\nIt printed:\n{answer.output}"


def _told(lost: InterpreterLost) -> str:
    """Tell the policy that what it defined is gone."""
    told = f"the program {lost}. Variables, imports and files of earlier calls are lost."
    return f"{told}\nIt printed:\n{lost.output}" if lost.output else told
