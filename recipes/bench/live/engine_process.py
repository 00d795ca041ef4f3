"""The engine as trainer rank 0 sees it: start it in an environment of its own, call it, end it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ....integration.errors import RefitError
from ..options import ENGINES, LiveOptions

_MODULE = "rlrefit.recipes.bench.live.engine_main"
# Of this trainer's world; engines make their own.
_TRAINERS_OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Seconds to close in order, before the processes are killed; and between looks at whether they live.
_CLOSE_S, _WATCH_EVERY = 30.0, 0.5
_TAIL_LINES = 30


class EngineProcess:
    """The engine in a process of its own, which may have another interpreter and other packages.

    Args:
        options: of the run.
        model: folder with the engine's ``config.json``.
        log: file for what the engine's processes print.
    """

    def __init__(self, options: LiveOptions, model: Path, log: Path):
        self._log, self._timeout_s, self._name = log, options.timeout_s, ENGINES[options.backend]
        ours, theirs = socket.socketpair()
        with log.open("wb") as output, theirs:
            self._process = subprocess.Popen(
                [options.engine_python or sys.executable, "-m", _MODULE, str(theirs.fileno())],
                env=_environment(options),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A process group of its own: it is ended as a whole.
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        self._send(
            {
                "backend": options.backend,
                "model": str(model),
                "device": options.device,
                "dtype": {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[options.dtype],
                "tp": options.gen.tp,
                "pp": options.gen.pp,
                "ep": options.gen.ep,
                "gpu_memory_utilization": options.gpu_memory_utilization,
            }
        )

    def submit(self, call: str, *arguments: Any) -> None:
        """Begin a call; :meth:`result` waits for it."""
        self._send({"call": call, "arguments": arguments})

    def result(self) -> Any:
        """What the call that was begun gives; also to be called once after the start.

        Raises:
            RefitError: the call failed, the engine died, or it did not answer in time.
        """
        deadline = time.monotonic() + self._timeout_s
        while not self._connection.poll(_WATCH_EVERY):
            if self._process.poll() is not None and not self._connection.poll():
                self._fail(f"it ended with exit code {self._process.returncode}")
            if time.monotonic() > deadline:
                self._fail(f"it did not answer within {self._timeout_s:.0f} s; --timeout sets the limit")
        try:
            answer = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_WATCH_EVERY)
            self._fail(f"it closed the connection; exit code {self._process.returncode}")
        if "error" in answer:
            self._fail(answer["error"])
        return answer["result"]

    def call(self, call: str, *arguments: Any) -> Any:
        """Call and wait."""
        self.submit(call, *arguments)
        return self.result()

    def close(self) -> None:
        """End the engine: in order if it still answers, else by force."""
        with contextlib.suppress(OSError, RefitError, subprocess.TimeoutExpired):
            self._timeout_s = _CLOSE_S
            self.call("close")
            self._process.wait(_CLOSE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._connection.send_bytes(json.dumps(message).encode())
        except OSError:
            self._fail(f"it can't be reached; exit code {self._process.poll()}")

    def _fail(self, why: str) -> Any:
        lines = self._log.read_text(errors="replace").splitlines()
        told = "\n".join(line[:500] for line in lines[-_TAIL_LINES:])
        raise RefitError(
            f"the {self._name} engine failed: {why}. The end of its log:\n{told}", stage="engine"
        )


def _environment(options: LiveOptions) -> dict[str, str]:
    environment = {key: value for key, value in os.environ.items() if key not in _TRAINERS_OWN}
    if options.engine_pythonpath is not None:
        environment["PYTHONPATH"] = options.engine_pythonpath
    if options.device == "cuda":
        # The trainer's ranks have the first GPUs.
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        last = options.world_size + options.gen_ranks
        visible = given.split(",") if given else [str(gpu) for gpu in range(last)]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible[options.world_size : last])
    return environment
