"""Calls of an engine's HTTP server."""

from __future__ import annotations

import functools
import http.client
import json
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ....integration.errors import RefitError, RefitTimeout

# Of the errors of a call that got no answer, or one that is no worker's.
STAGE = "http"
_REDIRECTIONS = (301, 302, 303, 307, 308)


class NotReached(RefitError):
    """Nothing listens at the server's address, so that nothing was asked of it."""


@dataclass(frozen=True)
class HttpAnswer:
    """What a server answered.

    Attributes:
        status: 200 and so on.
        content: the JSON object that it sent, or its text under ``message``.
        words: of an error, as the server told it.
    """

    status: int
    content: dict[str, Any]

    @property
    def words(self) -> str:
        found = next((self.content[key] for key in ("message", "error", "detail") if key in self.content), "")
        return str(found.get("message", found) if isinstance(found, dict) else found) or "without a reason"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Takes a redirection as the answer: urllib would send the key to where it leads, and GET what was to be POSTed."""

    def redirect_request(self, *args: Any) -> None:
        return None


@functools.cache
def _direct() -> urllib.request.OpenerDirector:
    """Made once, since that reads all certificates of the host, in tens of milliseconds.

    It does not go by the environment's proxies either: the server's workers reach the trainer without one, and what is asked holds secrets.
    """
    return urllib.request.build_opener(_NoRedirects, urllib.request.ProxyHandler({}))


class HttpCalls:
    """Calls one server, directly, and none that it redirects to.

    Args:
        url: of the server, ``http://host:port``.
        api_key: that it asks for, if it does.
        timeout_s: how long the server may keep a call waiting for its next byte.

    Raises:
        RefitError: ``url`` is not one of a server, or holds what would be a secret in the text of errors.
    """

    def __init__(self, url: str, api_key: str = "", timeout_s: float = 600.0) -> None:
        self.url = _require_address(url)
        self.timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def ask(
        self,
        method: str,
        path: str,
        fields: Mapping[str, Any] | None = None,
        *,
        name: str = "",
        timeout_s: float | None = None,
    ) -> HttpAnswer:
        """One call.

        Args:
            method: ``GET`` or ``POST``.
            path: with its query.
            fields: the body, as JSON.
            name: of the call in errors; method and path if left out.
            timeout_s: of this call.

        Raises:
            RefitError: the server can't be reached, redirects to another address, or ended before it had answered.
            RefitTimeout: no answer.
        """
        name = name or f"{method} {path}"
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        body = None if fields is None else json.dumps(fields).encode()
        request = urllib.request.Request(self.url + path, body, self._headers, method=method)
        try:
            try:
                with _direct().open(request, timeout=limit_s) as response:
                    return HttpAnswer(response.status, _read(response.read()))
            except urllib.error.HTTPError as error:  # an answer too, and its end may be missing as well
                if error.code in _REDIRECTIONS:
                    raise self._redirected(name, error) from error
                return HttpAnswer(error.code, _read(error.read()) or {"message": error.reason})
        except TimeoutError as error:
            raise RefitTimeout(
                f"the server at {self.url} did not answer {name} within {limit_s:.0f} s: requests do not end, or a worker hangs or "
                "has ended. Weights that were written in part are not served; look at the server's log and restart it",
                stage=STAGE,
            ) from error
        # An HTTPException comes from a server that ends before it has answered.
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or f"{type(error).__name__}: {error}"
            kind = NotReached if isinstance(reason, ConnectionRefusedError) else RefitError
            raise kind(
                f"the server at {self.url} did not answer {name}: {reason}. It may have ended. Weights that were written in part "
                "are not served",
                stage=STAGE,
            ) from error

    def _redirected(self, name: str, error: urllib.error.HTTPError) -> RefitError:
        to = urlsplit(error.headers.get("Location", ""))
        where = to._replace(netloc=to.netloc.rpartition("@")[2], query="", fragment="").geturl()
        return RefitError(
            f"the server at {self.url} answered {name} with {error.code}, which leads to {where}. Nothing was "
            "asked there: it would get the API key and the rendezvous' token. Give the address of the server itself, without what "
            "redirects to it",
            stage=STAGE,
        )


def _require_address(url: str) -> str:
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the port or of an IPv6 address
        known = False
    # A user and a password, a query or a fragment, which errors would show.
    if not known or any(mark in url for mark in "@?#"):
        shown = re.sub(r".*@|[?#].*", "…", url)
        raise RefitError(
            f"url: {shown!r} is not the address of a server alone, as http://host:8000 is. Give that, and a key as api_key",
            stage="settings",
        )
    return url.rstrip("/")


def _read(data: bytes) -> dict[str, Any]:
    """A JSON object, or text under ``message``."""
    try:
        found = json.loads(data)
    except ValueError:
        found = data.decode(errors="replace").strip()
    return found if isinstance(found, dict) else {"message": str(found)} if found else {}
