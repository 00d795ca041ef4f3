"""Payloads against the rules of both generations of TensorRT-LLM's restricted unpickler."""

from __future__ import annotations

import base64
import operator
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from rlrefit.integration.errors import RefitError
from rlrefit.integration.quantize.float8 import FLOAT8
from rlrefit.workers.engines.trtllm.payload import cuda_handle, decode, encode, restricted_loads

from .host_memory import APPROVED_HERE, cuda_shaped_handle, host_handle
from .serialization_double import GENERATIONS

_PLAIN = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8)


def _weights() -> dict[str, torch.Tensor]:
    numbers = torch.arange(256, dtype=torch.uint8)
    weights = {f"{dtype}": torch.arange(6).view(2, 3).to(dtype) for dtype in (*_PLAIN, torch.bool)}
    weights |= {name: numbers.clone().view(16, 16).view(dtype) for name, dtype in FLOAT8.items()}
    return weights | {"packed E2M1": numbers.clone(), "scalar": torch.tensor(0.75)}


def _read_by_stock(generation: str, payload: str) -> Any:
    loads, rules = GENERATIONS[generation]
    return loads(base64.b64decode(payload), **rules)


@pytest.fixture
def in_the_engine(extension: type) -> None:
    """This process has the generation's package."""


def test_payloads_pass_the_unpickler_as_the_engines_own_extension_calls_it(generation: str) -> None:
    weights = _weights()
    entries = _read_by_stock(generation, encode(weights.items(), cuda_shaped_handle))
    assert [entry[0] for entry in entries] == list(weights)
    for name, (rebuild, args), *float8 in entries:
        assert rebuild is reductions.rebuild_cuda_tensor
        assert len(args) == 15
        assert args[:4] == (torch.Tensor, weights[name].size(), weights[name].stride(), 0)
        assert args[5] == (torch.uint8 if name in FLOAT8 else weights[name].dtype)
        assert float8 == ([name] if name in FLOAT8 else [])


@pytest.mark.usefixtures("in_the_engine")
def test_every_dtype_arrives_bit_for_bit() -> None:
    weights = _weights()
    entries = decode(encode(weights.items(), host_handle), APPROVED_HERE)
    for entry in entries:
        opened, sent = entry.open(3), weights[entry.name]
        assert (opened.dtype, opened.shape) == (sent.dtype, sent.shape)
        assert torch.equal(opened.reshape(-1).view(torch.uint8), sent.reshape(-1).view(torch.uint8))
        assert opened.untyped_storage().is_shared()


def test_a_parameter_is_sent_as_a_plain_tensor(generation: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    (entry,) = _read_by_stock(generation, encode([("w", parameter)], cuda_shaped_handle))
    assert entry[1][1][0] is torch.Tensor
    assert entry[1][1][10] is False, "requires_grad"


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.uint16], ids=str)
def test_a_dtype_that_no_allow_list_has_is_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(RefitError) as met:
        encode([("model.norm.weight", torch.zeros(2, dtype=dtype))], cuda_shaped_handle)
    assert met.value.parameter == "model.norm.weight"


def test_host_memory_gets_no_cuda_handle() -> None:
    with pytest.raises(RefitError) as met:
        encode([("model.norm.weight", torch.zeros(2))], cuda_handle)
    assert met.value.parameter == "model.norm.weight"


class _Calls:
    """Unpickles by calling something."""

    def __init__(self, function: Any, *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> Any:
        return self._call


def hostile() -> dict[str, bytes]:
    called = {
        "os.system": _Calls(os.system, "touch /tmp/owned"),
        "eval": _Calls(eval, "1 + 1"),
        "getattr": _Calls(getattr, "text", "upper"),
        "__import__": _Calls(__import__, "subprocess"),
        "bytes with a pickle": _Calls(torch.storage._load_from_bytes, pickle.dumps(1)),
        "torch.load": _Calls(torch.load, "/tmp/owned"),
        "torch.hub": _Calls(torch.hub._load_local, "/tmp/owned", "model"),  # type: ignore[attr-defined]
        "torch.save": _Calls(torch.save, 1, "/tmp/owned"),
        "pickle.loads": _Calls(pickle.loads, pickle.dumps(1)),
        "operator": _Calls(operator.attrgetter, "system"),
    }
    nested = {name: pickle.dumps([("w", (call, ()))]) for name, call in called.items()}
    # A dotted name, by which protocol 4 and later reach what an approved module holds.
    dotted = b"\x80\x04\x8c\x0etorch.storage\x8c\x09os.system\x93."
    return nested | {"host memory": pickle.dumps([("w", torch.zeros(2))]), "dotted": dotted}


@pytest.mark.usefixtures("in_the_engine")
@pytest.mark.parametrize("kind", hostile())
def test_a_hostile_payload_is_refused_whatever_the_generation_would_let_through(kind: str) -> None:
    payload = base64.b64encode(hostile()[kind]).decode()
    with pytest.raises(RefitError, match="restricted unpickler refused"):
        decode(payload)


def test_an_unpickler_without_approvals_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    from .package_double import modules_of

    modules = modules_of("deny-list")
    modules["tensorrt_llm.serialization"].loads = lambda s, /, *, disallowed_imports=None: pickle.loads(s)  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(__import__("sys").modules, name, module)
    with pytest.raises(RefitError, match="takes no approved_imports"):
        restricted_loads(pickle.dumps([]), {})


@pytest.mark.usefixtures("in_the_engine")
@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("no base64!", "is not base64"),
        (pickle.dumps({"w": 1}), "holds a dict"),
        (pickle.dumps([("w",)]), "an entry is not"),
        (pickle.dumps([(1, (torch.Tensor, ()))]), "an entry is not"),
        (pickle.dumps([("w", torch.Tensor)]), "the handle is not"),
        (pickle.dumps([("w", (reductions.rebuild_cuda_tensor, (1, 2)))]), "has 2 arguments"),
        (pickle.dumps([("w", (torch.Tensor, (0,) * 15))]), "rebuilds tensors"),
        (pickle.dumps([("w", (reductions.rebuild_cuda_tensor, (0,) * 15), "float64")]), "float8 dtype"),
        (pickle.dumps([("w", (reductions.rebuild_cuda_tensor, (0,) * 15, "float64"))]), "float8 dtype"),
        (
            pickle.dumps([("w", (reductions.rebuild_cuda_tensor, (0,) * 15, "uint8", "uint8"))]),
            "the handle is not",
        ),
        (b"\x80\x05not a pickle", "restricted unpickler refused"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_malformed_payload_is_refused_before_anything_is_opened(content: Any, told: str) -> None:
    payload = content if isinstance(content, str) else base64.b64encode(content).decode()
    with pytest.raises(RefitError, match=told):
        decode(payload)


# Where the dtype stands, and how: the forms that senders of this contract have, and one that a handle may have.
FORMS: dict[str, Callable[[str, Any, str], tuple[Any, ...]]] = {
    "beside, by name": lambda name, handle, dtype: (name, handle, dtype),
    "beside, by torch's name": lambda name, handle, dtype: (name, handle, f"torch.{dtype}"),
    "beside, as itself": lambda name, handle, dtype: (name, handle, getattr(torch, dtype)),
    "in the handle, by name": lambda name, handle, dtype: (name, (*handle, dtype)),
    "in the handle, as itself": lambda name, handle, dtype: (name, (*handle, getattr(torch, dtype))),
    "both": lambda name, handle, dtype: (name, (*handle, dtype), getattr(torch, dtype)),
}


@pytest.mark.usefixtures("in_the_engine")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("in_bytes", [True, False], ids=["in bytes", "as it is"])
@pytest.mark.parametrize("encoded", [True, False], ids=["text", "a list"])
def test_the_dtype_is_taken_in_the_handle_and_beside_it(form: str, in_bytes: bool, encoded: bool) -> None:
    weights = _weights()
    entries = []
    for name, tensor in weights.items():
        raw = tensor.view(torch.uint8) if in_bytes and name in FLOAT8 else tensor
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(FORMS[form](name, host_handle(raw), dtype))
    payload: Any = base64.b64encode(pickle.dumps(entries)).decode() if encoded else entries
    for entry in decode(payload, APPROVED_HERE):
        opened, sent = entry.open(3), weights[entry.name]
        assert (opened.dtype, opened.shape) == (sent.dtype, sent.shape)
        assert torch.equal(opened.reshape(-1).view(torch.uint8), sent.reshape(-1).view(torch.uint8))


@pytest.mark.usefixtures("in_the_engine")
def test_an_entry_may_say_that_the_tensor_is_what_it_is() -> None:
    """As verl's rollout does of all but float8."""
    sent = torch.arange(6, dtype=torch.bfloat16)
    for entry in [("w", host_handle(sent), None)], [("w", (*host_handle(sent), None))]:
        (found,) = decode(base64.b64encode(pickle.dumps(entry)).decode(), APPROVED_HERE)
        assert torch.equal(found.open(0), sent)


@pytest.mark.parametrize(
    ("held", "told"),
    [
        (torch.uint8, ("float8_e4m3fn", "float8_e5m2")),
        (torch.float8_e4m3fn, ("float8_e5m2",)),
        (torch.float8_e4m3fn, ("uint8",)),
        (torch.bfloat16, ("float16",)),
        (torch.uint8, ("int8",)),
        (torch.uint8, ("nn",)),
        (torch.uint8, (["float8_e4m3fn"],)),
    ],
)
def test_a_dtype_that_the_bytes_do_not_have_is_refused_before_anything_is_opened(
    held: torch.dtype, told: tuple[Any, ...]
) -> None:
    """They would be read as other numbers, or converted to them by the engine's loader."""
    handle = cuda_shaped_handle(torch.zeros(4, dtype=held))
    with pytest.raises(RefitError) as caught:
        decode([("w", (*handle, told[0]), *told[1:])])
    assert (caught.value.stage, caught.value.parameter) == ("transfer", "w")


def test_a_list_that_saw_no_unpickler_is_held_to_the_same_functions() -> None:
    with pytest.raises(RefitError, match=r"posix\.system"):
        decode([("w", (os.system, ("true",) * 15))])
