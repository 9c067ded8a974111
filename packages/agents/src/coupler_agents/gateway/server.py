"""Listen on the loopback, and let requests with a key into their conversation."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from aiohttp import web

from coupler.conversation import ConversationOver
from coupler.errors import CouplerError, ReplicaDied, WaitTimeout, WorkerFailed
from coupler_agents.gateway import chat, generate, messages, responses
from coupler_agents.gateway.session import Bounds, Session, Talk
from coupler_agents.gateway.stream import COMMENT, Stream
from coupler_agents.gateway.wire import Object, Refused, dump, frame, load

HOST = "127.0.0.1"
KEY_BYTES = 32
REMEMBERED = 65536  # ended keys that are told from unknown ones
BACKLOG = 1024
CLOSE_SECONDS = 2.0
SMALL = 32768  # bytes, half of what asyncio takes for a client that does not read
LINGER_SECONDS = 2.0  # for what a refused client still sends
OF_THE_ROLLOUT = (ReplicaDied, WorkerFailed, WaitTimeout)
log = logging.getLogger(f"coupler.{__name__}")

Answer = Object | list[bytes]


@dataclass(frozen=True, slots=True)
class Route:
    """Answers the requests to one path.

    Attributes:
        error: makes an error of status, code and sentence.
        ping: the event that a stream of the dialect is kept open with, empty where
            there are no streams.
    """

    answer: Callable[[Session, Object], Awaitable[Answer]]
    error: Callable[[int, str, str], Object] = chat.error
    method: str = "POST"
    ping: bytes = b""


ROUTES = {
    "/v1/chat/completions": Route(chat.answer, ping=COMMENT),
    "/v1/models": Route(chat.models, method="GET"),
    "/v1/responses": Route(responses.answer, ping=COMMENT),
    "/v1/messages": Route(messages.answer, messages.error, ping=messages.PING),
    "/v1/messages/count_tokens": Route(messages.count_tokens, messages.error),
    "/inference/v1/generate": Route(generate.answer),
}


class Gateway:
    """An HTTP server on the loopback, at a port of the operating system's choice.

    All of its methods are called in the event loop that started it.
    """

    def __init__(self, bounds: Bounds | None = None) -> None:
        self.bounds = bounds or Bounds()
        self.url = ""
        self._salt = secrets.token_bytes(KEY_BYTES)
        self._sessions: dict[bytes, Session] = {}
        self._ended: OrderedDict[bytes, None] = OrderedDict()
        self._server: _Server | None = None
        self._listener: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the operating system gives no port.
        """
        self._server = _Server(
            self._handle,
            self.bounds.connections,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=self.bounds.idle_seconds,
            lingering_time=LINGER_SECONDS,
            auto_decompress=False,
            logger=log,
        )

        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._server, HOST, 0, backlog=BACKLOG)
        self.url = f"http://{HOST}:{self._listener.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """End every session, answer what still runs, and stop to listen."""
        for session in list(self._sessions.values()):
            self.end(session)
        if self._listener is None or self._server is None:
            return

        self._listener.close()
        self._server.pre_shutdown()
        await self._server.shutdown(CLOSE_SECONDS)
        self._listener = self._server = None

    def open(self, conversation: Talk) -> Session:
        """Give a conversation a key.

        Raises:
            CouplerError: the gateway does not listen.
        """
        if not self._listener:
            raise CouplerError(
                "a session needs a gateway that listens.\n  call:  await gateway.start()"
            )
        session = Session(
            conversation,
            self.url,
            secrets.token_urlsafe(KEY_BYTES),
        )
        self.admit(session, session.api_key)
        return session

    def admit(self, session: Session, key: str) -> None:
        """Let requests with one more key into a session, until it ends.

        Args:
            key: what nobody can guess. A request has it as the session's own key, or as
                ``X-Session-ID``.
        """
        session.keys.append(key)
        self._sessions[self._name(key)] = session

    def end(self, session: Session) -> None:
        """End the keys of a session. What still runs is cancelled and gets 410."""
        names = [self._name(key) for key in session.keys]
        session.keys.clear()
        session.end()

        for name in names:
            self._sessions.pop(name, None)
            self._ended[name] = None
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request. A client that leaves cancels this."""
        route = ROUTES.get(request.path)
        error, ping = (route.error, route.ping) if route else (chat.error, b"")
        bounds = self.bounds
        stream = Stream(
            request,
            ping,
            bounds.ping_seconds,
            bounds.send_seconds,
        )
        try:
            made = await self._answer(request, route, stream)
            status = 200
        except Refused as refused:
            made = error(refused.status, refused.code, str(refused))
            status = refused.status

        if stream.response:
            frames = made if isinstance(made, list) else [frame(made, "error")]
            await stream.send(frames, last=True)
            return stream.response
        response = _response(made, status)
        if status in (408, 413):
            response.force_close()
        await self._send(request, response)
        return response

    async def _send(self, request: web.BaseRequest, response: web.Response) -> None:
        """Write a response. A client that does not take it in time is cut off."""
        transport = request.transport
        if transport is None:
            return  # the client has left
        if (response.content_length or 0) < SMALL and not transport.get_write_buffer_size():
            # asyncio takes it at once, whatever the client does
            await response.prepare(request)
            await response.write_eof()
            return

        late = asyncio.get_running_loop().call_later(self.bounds.send_seconds, transport.abort)
        try:
            await response.prepare(request)
            await response.write_eof()
        finally:
            late.cancel()

    async def _answer(
        self, request: web.BaseRequest, route: Route | None, stream: Stream
    ) -> Answer:
        """Return what a session answers. A stream is begun where that takes long.

        Raises:
            Refused: it does not.
        """
        session = self._session(request)
        if route is None:
            raise Refused(
                f"there is nothing at {request.path[:80]!r}. There is {', '.join(ROUTES)}.",
                404,
                "not_found",
            )
        if request.method != route.method:
            raise Refused(
                f"{request.path} takes {route.method}.",
                405,
                "method_not_allowed",
            )

        with session.scope(self.bounds.in_flight) as running:
            try:
                async with running:
                    body = load(await self._body(request)) if route.method == "POST" else {}
                    turn = _turn(session, route, body)
                    if route.ping and body.get("stream") is True:
                        return await stream.pinging(turn)
                    return await turn
            except TimeoutError:
                raise _gone() from None

    def _session(self, request: web.BaseRequest) -> Session:
        """Return the session of a request's key.

        Raises:
            Refused: it has none.
        """
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = ""
        others = (request.headers.get(name, "") for name in ("X-Api-Key", "X-Session-ID"))

        names: list[bytes] = []
        for each in chain([key.strip()], others):
            if not each:
                continue
            names.append(self._name(each))
            session = self._sessions.get(names[-1])
            if session and any(_equal(each, own) for own in session.keys):
                return session
        if any(name in self._ended for name in names):
            raise _gone()
        raise Refused(
            "the request has no key of an episode. Send the key of this session as "
            "'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
            401,
            "invalid_api_key",
        )

    def _name(self, key: str) -> bytes:
        """Return a digest of a key, which nobody else can compute. Looking it up tells
        nothing of other keys.
        """
        return hashlib.blake2b(_bytes(key), key=self._salt, digest_size=16).digest()

    async def _body(self, request: web.BaseRequest) -> bytes:
        """Read the body of a request.

        Raises:
            Refused: it is too large, comes too slowly, is compressed or malformed.
        """
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise Refused("a compressed body is not supported. Send plain JSON.", 415)
        if (request.content_length or 0) > self.bounds.body:
            raise self._too_large()

        scope = asyncio.timeout(self.bounds.receive_seconds)
        try:
            # a body that came with its headers needs no clock
            if request.content.is_eof():
                whole = request.content.read_nowait()
                self._check_size(whole)
                return whole

            held = bytearray()
            async with scope:
                while part := await request.content.readany():
                    held += part
                    self._check_size(held)
            return bytes(held)
        except TimeoutError:
            if not scope.expired():
                raise
            raise Refused(
                f"the body took longer than {self.bounds.receive_seconds:g} seconds.",
                408,
                "too_slow",
            ) from None
        except web.RequestPayloadError as error:
            raise Refused(f"the body is malformed: {error}.") from None

    def _check_size(self, held: bytes | bytearray) -> None:
        if len(held) > self.bounds.body:
            raise self._too_large()

    def _too_large(self) -> Refused:
        return Refused(
            f"the body has more than {self.bounds.body} bytes.", 413, "request_too_large"
        )


class _Server(web.Server):
    """A server that takes a bounded number of connections."""

    def __init__(self, handler: Any, most: int, **options: Any) -> None:
        super().__init__(handler, **options)
        self._most, self._open = most, 0

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._open += 1
        if self._open > self._most:
            transport.abort()

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._open -= 1


async def _turn(session: Session, route: Route, body: Object) -> Answer:
    """Return the answer of a dialect.

    Raises:
        Refused: the conversation is over, the request is wrong, or the rollout failed.
    """
    try:
        return await route.answer(session, body)
    except ConversationOver as over:
        raise Refused(_sentence(over), 400, f"conversation_over_{over.ended}") from None
    except Refused:
        raise

    # what is not the caller's fault is kept for the owner of the session
    except OF_THE_ROLLOUT as error:
        raise _failed(session, error) from error
    except CouplerError as error:
        raise Refused(_sentence(error)) from None
    except Exception as error:
        log.exception("a turn behind the gateway failed")
        raise _failed(session, error) from error


def _failed(session: Session, error: BaseException) -> Refused:
    session.failure = session.failure or error
    return Refused(
        f"the rollout failed: {type(error).__name__}: {_sentence(error)}", 502, "rollout_failed"
    )


def _sentence(error: BaseException) -> str:
    """Return what an error says, on one line."""
    return " ".join(str(error).split())


def _gone() -> Refused:
    return Refused(
        "this episode has ended, and its key with it.",
        410,
        "episode_ended",
    )


def _equal(key: str, own: str) -> bool:
    return hmac.compare_digest(_bytes(key), _bytes(own))


def _bytes(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


def _response(made: Answer, status: int) -> web.Response:
    stream = isinstance(made, list)
    response = web.Response(
        body=b"".join(made) if stream else dump(made),
        status=status,
        content_type="text/event-stream" if stream else "application/json",
    )
    if status != 200:
        # clients of OpenAI and Anthropic send a refused request again if this lets them
        response.headers["X-Should-Retry"] = "true" if status == 429 else "false"
    return response
