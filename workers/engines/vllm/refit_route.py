"""``POST /refit`` of a vLLM server in development mode: a whole refit in one call.

Over vLLM's own calls a refit takes seven, each of which costs milliseconds that the trainer waits for. So does each that the server
makes of its engine, which are four here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, ValidationError
from vllm.v1.engine.exceptions import EngineDeadError

from .driver import PauseMode

PATH = "/refit"
_LOOK_S = 0.5


class _Asked(BaseModel):
    """The body of a call."""

    version: int = Field(ge=0, strict=True)
    mode: PauseMode = "keep"


async def refit(raw_request: Request) -> JSONResponse:
    """Pause, receive the weights, and resume.

    The body has ``version`` and ``mode``, of the pause. The answer has ``results``, the workers' records, or an ``error``; whether
    the server ``was_paused`` before; and whether the workers were asked (``sent``). After a failure the server stays as it is then.
    """
    try:
        asked = _Asked.model_validate_json(await raw_request.body())
    except ValidationError as error:
        return JSONResponse({"error": {"message": str(error)}}, HTTPStatus.BAD_REQUEST)
    llm: Any = raw_request.app.state.engine_client
    so_far = {"was_paused": await llm.is_paused(), "sent": False}

    async def all_of_it() -> list[dict[str, Any]]:
        # What sleeps runs nothing; to be paused, replicas would take steps together, in memory that is not there.
        if not (so_far["was_paused"] and await _asleep(llm)):
            await llm.pause_generation(mode=asked.mode)
        so_far["sent"] = True
        # As AsyncLLM.update_weights does, which keeps the records to itself.
        update_info = {"version": asked.version, "alone": True}
        records: list[dict[str, Any]] = await llm.collective_rpc(
            "update_weights", kwargs={"update_info": update_info}
        )
        await llm.resume_generation()
        return records

    try:
        records = await _unless_it_ends(llm, all_of_it())
    except EngineDeadError:
        raise  # vLLM's server ends then
    except Exception as error:  # whatever it is: the client has to hear how far it came
        content = {"error": {"message": str(error)}, **so_far}
        return JSONResponse(content, HTTPStatus.INTERNAL_SERVER_ERROR)
    return JSONResponse({"results": records, **so_far})


async def _unless_it_ends[T](llm: Any, calls: Coroutine[Any, Any, T]) -> T:
    """What ``calls`` of the engine give. One that ends meanwhile leaves its calls without an answer.

    Raises:
        EngineDeadError: it has ended.
    """
    task = asyncio.create_task(calls)
    while not (await asyncio.wait({task}, timeout=_LOOK_S))[0]:
        if llm.errored:
            task.cancel()
            raise llm.dead_error
    return task.result()


async def _asleep(llm: Any) -> bool:
    return any(answer["asleep"] for answer in await llm.collective_rpc("refit_asleep"))
