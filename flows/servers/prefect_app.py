"""The process of our Prefect server: Prefect's own application, closed to foreign web pages.

Prefect answers to any Host header, and its event and log streams (WebSockets, which CORS does not
cover) to any page. Here a request is refused that comes by another name than loopback's, or from a
page that is not the server's own. Run it with `python -m flows.servers.prefect_app` and Prefect's settings.
"""

from __future__ import annotations

import uvicorn
from prefect.server.api.server import create_app
from prefect.settings import get_current_settings
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HOSTS = ("127.0.0.1", "localhost")


class OwnPagesOnly:
    """Refuses requests and WebSockets of foreign pages (403), and keeps foreign pages from framing ours."""

    def __init__(self, app: ASGIApp, origins: frozenset[str]) -> None:
        self.app, self.origins = app, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what has no Origin (no page sent it, or it only follows a link) or an own one."""

        async def unframed(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Frame-Options"] = "SAMEORIGIN"
            await send(message)

        if scope["type"] not in {"http", "websocket"}:
            await self.app(scope, receive, send)
        elif Headers(scope=scope).get("origin") in {None, *self.origins}:
            await self.app(scope, receive, unframed)
        elif scope["type"] == "http":
            await PlainTextResponse("Foreign origin", status_code=403)(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008, "reason": "Foreign origin"})


def main() -> None:
    """Serve Prefect's API, pages and background services until a signal ends them."""
    server = get_current_settings().server
    app = create_app(final=True)
    app.add_middleware(OwnPagesOnly, origins=frozenset(server.api.cors_allowed_origins.split(",")))
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=HOSTS, www_redirect=False)
    uvicorn.run(
        app,
        host=server.api.host,
        port=server.api.port,
        timeout_keep_alive=server.api.keepalive_timeout,
        ws_ping_interval=server.api.websocket_ping_interval,
        ws_ping_timeout=server.api.websocket_ping_timeout,
        log_level=server.logging_level.lower(),
    )


if __name__ == "__main__":
    main()
