"""Requests to a server of rewards: JSON, tried again where that may help, within one deadline."""

import asyncio
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import httpx2
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    stop_any,
    stop_before_delay,
)

from generators.rewards.arguments import check_count, check_number, check_url, read_key

MAX_ANSWER = 4 << 20
"""Bytes of an answer's body."""
AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""Statuses after which the same request may succeed."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
FIRST_WAIT_S, LONGEST_WAIT_S = 0.25, 8.0


class RequestFailed(Exception):
    """A server has given no answer that can be used."""


class RequestFailedForNow(RequestFailed):
    """The same request may succeed later."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        """`wait_s`: how long the server asks to wait."""
        super().__init__(message)
        self.wait_s = wait_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardServer:
    """An address that takes JSON by POST."""

    url: str
    key: str | None = None
    """Goes into `Authorization`, and into no message."""
    attempts: int = 8
    attempt_timeout_s: float = 12.0
    timeout_s: float = 25.0
    """For all attempts and the waits between them."""

    async def post_json(self, body: Mapping[str, Any], timeout_s: float | None = None) -> Any:
        """Returns the answer's JSON. `timeout_s` is what is left of the time for it; None: all.

        Raises RequestFailed, with the last failure, where no attempt has an answer before the deadline.
        """
        longest_s = self.timeout_s if timeout_s is None else timeout_s
        failures: list[str] = []

        def note_failure(state: RetryCallState) -> None:
            assert state.outcome is not None
            failures.append(str(state.outcome.exception()))

        retrying = AsyncRetrying(
            # A wait that ends after the deadline is not begun.
            stop=stop_any(stop_after_attempt(self.attempts), stop_before_delay(longest_s)),
            wait=choose_wait,
            retry=retry_if_exception_type(RequestFailedForNow),
            after=note_failure,
            reraise=True,
        )
        try:
            async with asyncio.timeout(longest_s), self._open_client() as client:
                return await retrying(self._try_once, client, body)
        except TimeoutError as error:
            last = f"; the last attempt: {failures[-1]}" if failures else ""
            raise RequestFailed(
                f"{self.url} must answer within {self.timeout_s:g} s (timeout_s), got {len(failures)} failed "
                f"attempts and one under way{last}"
            ) from error

    def _open_client(self) -> httpx2.AsyncClient:
        headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        verify = make_tls_context() if self.url.startswith("https") else False
        # A proxy of the environment does not lead back to this machine.
        is_elsewhere = urlsplit(self.url).hostname not in LOOPBACK
        return httpx2.AsyncClient(headers=headers, timeout=None, verify=verify, trust_env=is_elsewhere)

    async def _try_once(self, client: httpx2.AsyncClient, body: Mapping[str, Any]) -> Any:
        try:
            # The client's own limits are for each piece that arrives, and a server may send one a second.
            async with asyncio.timeout(self.attempt_timeout_s):
                async with client.stream("POST", self.url, json=dict(body)) as response:
                    data = await self._read_body(response)
        except TimeoutError as error:
            message = f"{self.url} must answer an attempt within {self.attempt_timeout_s:g} s, got none"
            raise RequestFailedForNow(f"{message} (attempt_timeout_s)") from error
        except (httpx2.TransportError, httpx2.DecodingError) as error:
            raise RequestFailedForNow(f"{self.url}: {type(error).__name__}: {error}") from error
        if response.status_code != 200:
            text = self._show_body(data)
            message = f"{self.url} must answer with status 200, got {response.status_code}: {text}"
            if response.status_code in AGAIN:
                raise RequestFailedForNow(message, read_retry_after(response.headers.get("Retry-After")))
            raise RequestFailed(message)
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            message = f"{self.url} must answer with JSON, got {self._show_body(data)!r}"
            raise RequestFailedForNow(message) from error

    async def _read_body(self, response: httpx2.Response) -> bytes:
        data = b""
        async for piece in response.aiter_bytes():
            data += piece
            if len(data) > MAX_ANSWER:
                raise RequestFailed(f"{self.url} must answer with at most {MAX_ANSWER} bytes, got more")
        return data

    def _show_body(self, data: bytes) -> str:
        """Returns the beginning of a body. Some servers repeat the key that they refuse."""
        text = data.decode(errors="replace")
        return (text if self.key is None else text.replace(self.key, "…"))[:200]


def choose_wait(state: RetryCallState) -> float:
    """Returns the seconds that the server asks for, or else twice as many as before, drawn between half and
    all of that."""
    assert state.outcome is not None
    error = state.outcome.exception()
    if isinstance(error, RequestFailedForNow) and error.wait_s is not None:
        return error.wait_s
    wait_s = min(FIRST_WAIT_S * 2 ** (state.attempt_number - 1), LONGEST_WAIT_S)
    return wait_s * random.uniform(0.5, 1.0)


def read_retry_after(value: str | None) -> float | None:
    """Reads the header `Retry-After`: seconds, or a date. None where it is missing or neither."""
    if value is None:
        return None
    if value.strip().isascii() and value.strip().isdigit():
        return float(value[:9])
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    return max(0.0, (date - datetime.now(UTC)).total_seconds())


@cache
def make_tls_context() -> Any:
    return httpx2.create_ssl_context()


def check_server(
    url: Any, path: str, key_env: Any, attempts: Any, attempt_timeout_s: Any, timeout_s: Any
) -> RewardServer:
    """Returns the server of a part's arguments; `path` is added to its address. Raises ValueError for an
    argument that breaks its rule."""
    longest_s = check_number("timeout_s", timeout_s, above=0)
    return RewardServer(
        url=check_url("url", url) + path,
        key=read_key("key_env", key_env),
        attempts=check_count("attempts", attempts),
        attempt_timeout_s=check_number("attempt_timeout_s", attempt_timeout_s, above=0, highest=longest_s),
        timeout_s=longest_s,
    )
