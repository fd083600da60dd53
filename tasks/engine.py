"""Rollout engine: the project's cached decoder as an HTTP server with a subset of sglang's native API (paper §3.2, §4.1).

    python -m tasks.engine --model data/sft --port 30000 --threads 1
    curl -s localhost:30000/generate -d '{"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 8}}'

A request is executed as one batch of its own unless --max-rows lets requests share batches (tasks/engine_worker.py). The reply
of /generate is a function of the request, its sampling_seed and the weights. There is no tokenizer here: token ids in and out.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import signal
import socket
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

MAX_BODY = 256 << 20  # bytes
HEARTBEAT = 30.0  # seconds without a step, while there is work, after which /health_generate fails
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def build_app(worker, options: dict):
    """The ASGI application over an EngineWorker. `options` is what /get_server_info shows."""
    import orjson
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    from tasks.engine_api import parse_generate
    from tasks.engine_worker import EngineClosed

    def answer(value: object, status: int = 200) -> Response:
        return Response(orjson.dumps(value), status_code=status, media_type="application/json")

    def error(message: str, status: int) -> Response:
        kinds = {400: "BadRequestError", 413: "RequestTooLarge", 503: "ServiceUnavailable"}
        return answer(
            {"error": {"message": message, "type": kinds.get(status, "InternalError"), "code": status}}, status
        )

    async def body_of(request: Request) -> object:
        size = request.headers.get("content-length")
        if size is not None and int(size) > MAX_BODY:
            raise OverflowError(f"the request body has {size} bytes; the limit is {MAX_BODY}")
        raw = await request.body()
        if len(raw) > MAX_BODY:
            raise OverflowError(f"the request body has {len(raw)} bytes; the limit is {MAX_BODY}")
        if not raw:
            return {}
        try:
            return orjson.loads(raw)
        except orjson.JSONDecodeError as failure:
            raise ValueError(f"the request body is not valid JSON: {failure}") from None

    def fields(body: object, **types) -> list:
        """Named fields of a JSON object, None when absent; ValueError for a wrong type."""
        if not isinstance(body, dict):
            raise ValueError("the request body must be a JSON object")
        values = []
        for name, kinds in types.items():
            value = body.get(name)
            if value is not None and type(value) not in kinds:
                raise ValueError(f"{name} must be of type {' or '.join(k.__name__ for k in kinds)}, got {value!r}")
            values.append(value)
        return values

    def guarded(handler):
        async def run(request: Request) -> Response:
            try:
                return await handler(request)
            except ValueError as failure:
                return error(str(failure), 400)
            except OverflowError as failure:
                return error(str(failure), 413)
            except EngineClosed as failure:
                return error(str(failure), 503)
            except Exception as failure:
                return error(f"{type(failure).__name__}: {failure}", 500)

        return run

    async def finished(future: Future):
        return await asyncio.wrap_future(future)

    async def generate(request: Request) -> Response:
        job = worker.submit(parse_generate(await body_of(request), worker.next_seed()))
        done = asyncio.ensure_future(finished(job.future))
        gone = asyncio.ensure_future(disconnected(request))
        await asyncio.wait({done, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not done.done():
            worker.cancel(job)
            return error("the client disconnected", 499)
        return answer(done.result())

    async def disconnected(request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    async def update_weights(request: Request) -> Response:
        path, version, abort_all = fields(
            await body_of(request), model_path=(str,), weight_version=(str, int), abort_all_requests=(bool,)
        )
        if not path:
            raise ValueError("model_path is required: the directory of a checkpoint")
        if isinstance(version, str):
            if not version.isdecimal():
                raise ValueError(f"weight_version must be a whole number, got {version!r}: versions are ordered")
            version = int(version)
        try:
            new = await finished(worker.update_weights(path, version, bool(abort_all)))
        except (ValueError, OSError) as failure:
            return answer({"success": False, "message": str(failure), "num_paused_requests": 0}, 400)
        return answer({"success": True, "message": f"weights of version {new} are live", "weight_version": str(new)})

    async def pause(request: Request) -> Response:
        (mode,) = fields(await body_of(request), mode=(str,))
        await finished(worker.pause(mode or "abort"))
        return answer({"status": "ok", "mode": mode or "abort"})

    async def resume(request: Request) -> Response:
        await finished(worker.resume())
        return answer({"status": "ok"})

    async def abort(request: Request) -> Response:
        rid, all_requests = fields(await body_of(request), rid=(str,), abort_all=(bool,))
        if not rid and not all_requests:
            raise ValueError("give rid, or abort_all: true")
        worker.abort(rid, bool(all_requests))
        return answer({"status": "ok"})

    async def flush_cache(request: Request) -> Response:
        # every request starts from an empty cache here; the call exists so that one client serves both engines
        return answer({"success": True, "message": "no cache outlives a request"})

    def info() -> dict:
        cfg = worker.model.cfg
        return {
            "model_path": str(worker.model_path),
            "tokenizer_path": str(worker.model_path),
            "is_generation": True,
            "model_type": "glm_moe_dsa",
            "architectures": ["GlmMoeDsaForCausalLM"],
            "weight_version": str(worker.weight_version),
            "vocab_size": cfg.vocab_size,
            "context_length": cfg.max_position_embeddings,
            "index_topk": cfg.index_topk,
            "eos_token_ids": list(cfg.eos_token_ids),
            "dtype": worker.decoder.dtype,
        }

    async def model_info(request: Request) -> Response:
        return answer(info())

    async def weight_version(request: Request) -> Response:
        return answer({"weight_version": str(worker.weight_version)})

    async def server_info(request: Request) -> Response:
        return answer({**options, **info(), "paused": worker.paused, "internal_states": [worker.load()]})

    async def load(request: Request) -> Response:
        now = worker.load()
        total = now["num_running_reqs"] + now["num_waiting_reqs"]
        return answer([{"dp_rank": 0, "num_reqs": total, "num_waiting_reqs": now["num_waiting_reqs"], "num_tokens": 0}])

    async def models(request: Request) -> Response:
        return answer(
            {"object": "list", "data": [{"id": str(worker.model_path), "object": "model", "owned_by": "arcline"}]}
        )

    async def health(request: Request) -> Response:
        if not worker.is_alive():
            return error("the decode thread has ended", 503)
        return answer({"status": "ok"})

    async def health_generate(request: Request) -> Response:
        """One token through the queue; while a long batch runs, its progress is the proof instead."""
        if not worker.is_alive():
            return error("the decode thread has ended", 503)
        if worker.paused is not None:
            return answer({"status": "paused"})
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "sampling_seed": 0}}
        job = worker.submit(parse_generate(body, 0))
        done = asyncio.ensure_future(finished(job.future))
        before, waited = worker.steps, 0.0
        while waited < HEARTBEAT:
            await asyncio.wait({done}, timeout=1.0)
            if done.done():
                done.result()
                return answer({"status": "ok"})
            if worker.steps != before:
                worker.cancel(job)
                return answer({"status": "busy"})
            waited += 1.0
        worker.cancel(job)
        return error(f"no decode step in {HEARTBEAT:.0f} s", 503)

    def routes(paths: str, handler, methods: list[str]) -> list[Route]:
        return [Route(path, guarded(handler), methods=methods) for path in paths.split()]

    both = ["GET", "POST"]
    return Starlette(
        routes=[
            *routes("/generate", generate, ["POST", "PUT"]),
            *routes("/update_weights_from_disk", update_weights, ["POST"]),
            *routes("/pause_generation", pause, ["POST"]),
            *routes("/continue_generation", resume, ["POST"]),
            *routes("/abort_request", abort, ["POST"]),
            *routes("/flush_cache", flush_cache, both),
            *routes("/model_info /get_model_info", model_info, both),
            *routes("/get_weight_version /weight_version", weight_version, both),
            *routes("/server_info /get_server_info", server_info, both),
            *routes("/get_load", load, both),
            *routes("/v1/models", models, ["GET"]),
            *routes("/health /ping", health, both),
            *routes("/health_generate", health_generate, both),
        ]
    )


def _watch_parent(parent: int, pipe: bool) -> None:
    """End with the parent: by signal when the kernel offers it, and by the end of the stdin pipe in any case."""
    if parent:
        try:
            ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        except (OSError, AttributeError):
            pass
        if os.getppid() != parent:  # it ended before the call above
            os._exit(1)
    if pipe:

        def wait() -> None:
            while os.read(0, 4096):
                pass
            os._exit(1)

        threading.Thread(target=wait, name="parent", daemon=True).start()


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tasks.engine", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--allow-remote", action="store_true", help="permit a --host that is not loopback")
    parser.add_argument("--port", type=int, default=30000, help="0 takes a free port")
    parser.add_argument("--port-file", type=Path, help="where the port is written once the engine answers")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the decoder")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "int8", "fp8"), default="float32")
    parser.add_argument("--max-rows", type=int, default=0, help="rows of a shared batch; 0: one request, one batch")
    parser.add_argument("--seed", type=int, default=0, help="for requests without a sampling_seed")
    parser.add_argument("--weight-version", type=int, default=0, help="version of the weights in --model")
    parser.add_argument("--parent", type=int, default=0, help="process id to die with")
    parser.add_argument("--exit-with-stdin", action="store_true", help="end when stdin closes")
    args = parser.parse_args(argv)
    if args.host not in LOOPBACK and not args.allow_remote:
        parser.error(f"--host {args.host} would expose an engine without authentication; add --allow-remote to mean it")
    if args.threads < 1:
        parser.error("--threads must be at least 1")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    _watch_parent(args.parent, args.exit_with_stdin)
    import torch
    import uvicorn

    from tasks.engine_worker import EngineWorker

    torch.set_num_threads(args.threads)
    try:
        worker = EngineWorker(args.model, args.dtype, args.max_rows, args.seed, args.weight_version)
    except (ValueError, OSError) as failure:
        sys.exit(f"engine: cannot load {args.model}: {failure}")
    worker.start()
    sock = socket.create_server((args.host, args.port), family=socket.AF_INET6 if ":" in args.host else socket.AF_INET)
    port = sock.getsockname()[1]
    options = {"host": args.host, "port": port, "threads": args.threads, "max_rows": args.max_rows, "seed": args.seed}
    config = uvicorn.Config(
        build_app(worker, options), log_level="warning", access_log=False, timeout_graceful_shutdown=1, lifespan="off"
    )
    if args.port_file is not None:
        beside = args.port_file.with_name(args.port_file.name + ".new")
        beside.write_text(f"{port}\n", encoding="utf-8")
        os.replace(beside, args.port_file)
    print(f"engine: serving {args.model} on http://{args.host}:{port}", file=sys.stderr, flush=True)
    uvicorn.Server(config).run(sockets=[sock])
    worker.close()


if __name__ == "__main__":
    main()
