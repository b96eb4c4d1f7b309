"""Endpoints about the server, its tokenizer, and the whole engine."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from megatron_async.errors import EngineDeadError, EngineStalledError, RequestError
from megatron_async.processes.private_folder import private_folder
from megatron_async.request.parameter_checks import check_vocabulary
from megatron_async.serving.bodies.body import Body, Messages, OwnFields, Several, Token
from megatron_async.serving.http.errors import ApiError
from megatron_async.serving.http.frontend import Frontend
from megatron_async.serving.http.sse import until_disconnect
from megatron_async.version import __version__

PROFILE = "trace.json"
PauseMode = Literal["keep", "wait", "abort"]
Seconds = Annotated[float, Field(ge=0.0, le=86_400.0)]


class TokenizeRequest(OwnFields):
    """``POST /tokenize``: of a text, or of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Several[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """``POST /detokenize``: as in vLLM, special tokens are shown."""

    model: str | None = None
    tokens: Several[Token]
    skip_special_tokens: bool | None = None


class PauseRequest(Body):
    """``POST /pause``: what becomes of running requests, and how long they are waited for; and
    whether cached prefixes are forgotten then."""

    mode: PauseMode | None = None
    timeout: Seconds | None = None
    clear_cache: bool = False


class WeightsRequest(Body):
    """``POST /weights``: a model directory in the server's file system."""

    path: str = Field(min_length=1)
    recompute_kv_cache: bool = True


class ProfileRequest(Body):
    """``POST /profile``: how many steps, and how long they are waited for."""

    steps: int = Field(default=100, ge=1, le=10_000)
    timeout: Seconds = 60.0


def check_health(front: Frontend) -> dict[str, Any]:
    """Raises EngineDeadError while requests cannot be served, or are not. Nobody is asked: the
    engine's process says now and then how it is."""
    front.generator.check_ready()
    snapshot = front.generator.client.snapshot
    if snapshot is not None and snapshot.stalled is not None:
        raise EngineStalledError(snapshot.stalled)
    return {"status": "ok"}


def version() -> dict[str, Any]:
    """Return the version of this package."""
    return {"version": __version__}


async def models(front: Frontend) -> dict[str, Any]:
    """``GET /v1/models``."""
    return {"object": "list", "data": [await model(front, n) for n in front.config.model_names]}


async def model(front: Frontend, name: str) -> dict[str, Any]:
    """``GET /v1/models/NAME``; raises ApiError for a model that is not served."""
    length = vocab_size = None
    with contextlib.suppress(EngineDeadError):  # it has never been there: the rest is known
        info = await front.generator.client.info()
        length, vocab_size = info.max_sequence_length, info.vocab_size
    return {
        "id": front.check_model(name),
        "object": "model",
        "created": front.started,
        "owned_by": "megatron-async",
        "root": front.config.model_names[0],
        "parent": None,
        "max_model_len": length,
        "vocab_size": vocab_size,
    }


async def tokenize(front: Frontend, body: TokenizeRequest) -> dict[str, Any]:
    """Token ids of a text, or of a chat's prompt."""
    front.check_model(body.model)
    text, field = body.prompt, "prompt"
    if (text is None) == (body.messages is None):
        raise ApiError(400, "send either prompt or messages", param="prompt")
    if text is None:
        field = "messages"
        made = await front.chat.prompt(
            body.messages or [],
            front.chat.tool_use(body.tools, body.tool_choice, True),
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
            chat_template_kwargs=body.chat_template_kwargs,
        )
        text = made.text
    # A chat template writes the begin token itself.
    default = field == "prompt"
    adds = default if body.add_special_tokens is None else body.add_special_tokens
    ids = await front.generator.tokenize(text, add_special_tokens=adds, field=field)
    length = (await front.generator.client.info()).max_sequence_length
    names = await front.generator.texts.token_names(ids) if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": names}


async def detokenize(front: Frontend, body: DetokenizeRequest) -> dict[str, Any]:
    """The text of token ids."""
    front.check_model(body.model)

    def text() -> str:
        check_vocabulary("tokens", body.tokens, front.tokenizer.vocab_size)
        return front.tokenizer.detokenize(body.tokens, bool(body.skip_special_tokens))

    try:
        return {"prompt": await front.generator.texts.run(len(body.tokens), text)}
    except RequestError as error:
        raise ApiError(400, str(error), param="tokens") from None


async def pause(front: Frontend, asked: PauseRequest) -> dict[str, Any]:
    """Pause the engine; raises as ``Generator.command``."""
    state = await front.generator.command("pause", mode=asked.mode, timeout=asked.timeout)
    if asked.clear_cache:
        await front.generator.command("reset_prefix_cache")
    return state


async def weights(front: Frontend, body: WeightsRequest) -> dict[str, Any]:
    """Replace the weights; raises ApiError for what is no weights of this model."""
    arguments = {"path": body.path, "recompute_kv_cache": body.recompute_kv_cache}
    try:
        return await front.generator.command("weights", **arguments)
    except RequestError as error:
        raise ApiError(400, str(error), param="path") from None


async def profile(front: Frontend, request: Request, body: ProfileRequest) -> Response:
    """A trace of the next steps, for ui.perfetto.dev. The engine process, on the same machine,
    writes it into a directory that only this user can read. It is not taken to its end when the
    client goes away."""
    with private_folder(PROFILE) as directory:
        file = Path(directory) / PROFILE
        taken = front.generator.command(
            "profile", path=str(file), steps=body.steps, timeout=body.timeout
        )
        await until_disconnect(request.receive, taken)
        content = file.read_bytes()
    headers = {"Content-Disposition": 'attachment; filename="trace.json"'}
    return Response(content, media_type="application/json", headers=headers)
