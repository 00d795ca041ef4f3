"""vLLM's own servers, ``vllm serve``, in processes of the tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import requests
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.vllm_processes import vllm_processes

BACKEND = ["--weight-transfer-config", '{"backend": "rlrefit"}']
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def _serve(arguments: list[str]) -> None:
    """What ``vllm serve`` does with its arguments."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    command = ServeSubcommand()
    found = command.subparser_init(FlexibleArgumentParser().add_subparsers()).parse_args(arguments)
    command.validate(found)
    command.cmd(found)


def serve_routes(arguments: list[str], port: int) -> None:
    """vLLM's own routes, without an engine behind them."""
    import uvicorn
    from vllm.entrypoints.openai.api_server import build_app
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    found = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    app = build_app(found, ("generate",))
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", lifespan="off")


@contextmanager
def running(url: str, known_by: str, target: Callable[..., None], *args: Any) -> Iterator[None]:
    """A process that serves ``url``."""
    process = vllm_processes().Process(target=target, args=args)
    process.start()
    try:
        _wait_until_it_serves(url, process, known_by)
        yield
    finally:
        process.terminate()
        process.join(10)  # one with a request that vLLM never answers would wait for it
        process.kill()


def serving(path: str, url: str, *arguments: str) -> AbstractContextManager[None]:
    """``vllm serve`` of a checkpoint."""
    plain = [
        *(path, "--host", "127.0.0.1", "--port", url.rpartition(":")[2]),
        *("--dtype", "bfloat16", "--max-model-len", "512", "--enforce-eager"),
        *("--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"),
    ]
    return running(url, "health", _serve, [*plain, *arguments])


def _wait_until_it_serves(url: str, process: Any, known_by: str) -> None:
    while process.is_alive():
        try:
            if requests.get(f"{url}/{known_by}", timeout=5).ok:
                return
        except (requests.ConnectionError, requests.Timeout):  # of one that has begun to listen, and is busy
            time.sleep(0.1)
    raise AssertionError(f"vLLM's server ended with exit code {process.exitcode}")


def write_tokenizer(folder: str | Path, words: int = 128) -> None:
    """One whose tokens are ``w0`` to ``w127``, for a checkpoint; its chats are the words of all messages."""
    of_words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
    of_words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=of_words, eos_token="w2", pad_token="w0")
    made.chat_template = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
    made.response_schema = {"type": "object", "properties": {"content": {"type": "string"}}}
    made.save_pretrained(folder)
