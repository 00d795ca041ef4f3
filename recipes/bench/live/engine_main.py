"""The engine's process: a vLLM or an SGLang that obeys trainer rank 0 over a socket which it inherits.

``python -m rlrefit.recipes.bench.live.engine_main FD``. Messages are JSON: first the settings, answered once the
engine is up; then ``{"call": name, "arguments": [...]}``, each answered by ``{"result": …}`` or ``{"error": text}``.
When the other end is gone, this process and all of the engine's end.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from .engine import LiveEngine

# Neither is loaded unless it is asked for.
_ENGINES = {"vllm": "vllm_engine.VllmEngine", "sglang": "sglang_engine.SglangEngine"}


def serve(connection: Connection) -> None:
    """Start the engine and answer calls until it is closed."""
    inbox: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_receive, args=(connection, inbox), daemon=True).start()
    engine: LiveEngine | None = None
    while True:
        message = inbox.get()
        try:
            if engine is None:
                engine = _engine(message)
                answer: Any = engine.versions()
            else:
                answer = getattr(engine, message["call"])(*message["arguments"])
            connection.send_bytes(json.dumps({"result": answer}).encode())
        # Of any kind: trainer rank 0 has to hear of it, and decides what follows.
        except Exception as error:
            connection.send_bytes(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        if message.get("call") == "close":
            return


def _engine(settings: dict[str, Any]) -> LiveEngine:
    module, _, name = _ENGINES[settings["backend"]].partition(".")
    engine: LiveEngine = getattr(importlib.import_module(f".{module}", __package__), name)(settings)
    return engine


def _receive(connection: Connection, inbox: queue.Queue[dict[str, Any]]) -> None:
    try:
        while True:
            inbox.put(json.loads(connection.recv_bytes()))
    except (EOFError, OSError):
        # Trainer rank 0 is gone; the engine's own processes are of this process group.
        os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
