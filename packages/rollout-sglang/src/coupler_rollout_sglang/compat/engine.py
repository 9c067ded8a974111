"""Start SGLang and call its tokenizer manager, in the process that holds it."""
# pyright: reportMissingImports=false
# The environment that is type-checked has no SGLang: its torch may be another.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from http import HTTPStatus
from typing import Any

from coupler.errors import ReplicaDied
from coupler_rollout_sglang import messages

# The name of each call is that of SGLang's HTTP endpoint. It maps to a method of the
# tokenizer manager, and to the class of its argument.
CALLS = {
    "pause_generation": ("pause_generation", "PauseGenerationReqInput"),
    "continue_generation": ("continue_generation", "ContinueGenerationReqInput"),
    "begin_weight_update": ("begin_weight_update", "BeginWeightUpdateReqInput"),
    "update_weights_from_tensor": ("update_weights_from_tensor", "UpdateWeightsFromTensorReqInput"),
    "end_weight_update": ("end_weight_update", "EndWeightUpdateReqInput"),
    "release_memory_occupation": ("release_memory_occupation", "ReleaseMemoryOccupationReqInput"),
    "resume_memory_occupation": ("resume_memory_occupation", "ResumeMemoryOccupationReqInput"),
}


def start(arguments: dict[str, Any]) -> Any:
    """Start an engine, whose schedulers get processes of their own.

    Raises:
        ReplicaDied: one of these ended meanwhile.
    """
    from sglang.srt.entrypoints.engine import Engine

    class TokensOnly(Engine):
        """Start no process that turns tokens into text: with ``skip_tokenizer_init``
        nobody sends it any.
        """

        @classmethod
        def _launch_detokenizer_subprocesses(
            cls, *_: Any, **__: Any
        ) -> tuple[list[Any], list[str]]:
            return [], []

    try:
        return TokensOnly(**arguments)
    except RuntimeError as error:
        if "scheduler died" in str(error):
            raise ReplicaDied(messages.DIED_AT_START) from error
        raise


def serve(arguments: dict[str, Any], ready: Callable[[], None]) -> None:
    """Start SGLang's HTTP server, and return when it ends.

    Args:
        ready: called once, when the server answers.
    """
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    launch_server(ServerArgs(**arguments), launch_callback=ready)


def has_sessions() -> bool:
    """Tell if this release wants weight updates to begin and end."""
    from sglang.srt.managers import io_struct

    return hasattr(io_struct, "BeginWeightUpdateReqInput")


async def call(engine: Any, name: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Make one call of SGLang's HTTP interface without HTTP.

    Returns:
        The status and the answer that the server would give.
    """
    from sglang.srt.managers import io_struct

    manager = engine.tokenizer_manager
    if name == "generate":
        return HTTPStatus.OK, await _generate(manager, io_struct.GenerateReqInput(**body))
    if name == "abort_request":
        manager.abort_request(rid=body["rid"])
        return HTTPStatus.OK, {}
    if name == "get_weights_by_name":
        asked = io_struct.GetWeightsByNameReqInput(**body)
        return HTTPStatus.OK, await manager.get_weights_by_name(asked)
    if name == "flush_cache":
        answer = await manager.flush_cache()
        return HTTPStatus.OK if answer.success else HTTPStatus.BAD_REQUEST, {}

    method, argument = CALLS[name]
    if not hasattr(io_struct, argument):
        return HTTPStatus.NOT_FOUND, {}
    made = await getattr(manager, method)(getattr(io_struct, argument)(**body))
    if isinstance(made, tuple):
        success, message = made
        return HTTPStatus.OK, {"success": success, "message": message}
    return HTTPStatus.OK, {}


async def _generate(manager: Any, request: Any) -> dict[str, Any]:
    manager.auto_create_handle_loop()
    async for output in manager.generate_request(request, None):
        return output
    raise RuntimeError("SGLang ended a request without an output")


def server_fields() -> set[str]:
    """Return the names of SGLang's server arguments."""
    from sglang.srt.server_args import ServerArgs

    if is_dataclass(ServerArgs):
        return {field.name for field in fields(ServerArgs)}
    return set(ServerArgs.__struct_fields__)
