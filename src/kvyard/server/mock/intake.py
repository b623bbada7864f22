"""The intake: from a request's body to jobs at a worker. Refuses, in vLLM's words if it has some, what vLLM refuses."""

from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any

import msgspec
import xxhash

from kvyard.engine.role import Role
from kvyard.hashing import Namespace, TokenChain
from kvyard.openai import ChatMessage, ChatRequest, CompletionRequest, GenerationRequest
from kvyard.server.hinting import AskedHints, read_hints
from kvyard.server.http import Refusal, picked
from kvyard.server.mock.answers import AnswerWish, MadeAnswer, compose
from kvyard.server.mock.choice import RequestFlow
from kvyard.server.mock.incoming import ROOM, IncomingPrompt, PromptAddress, TransferWish
from kvyard.server.mock.worker import TURN, MockWorker
from kvyard.server.tokens import ByteTokenizer, Tokenizer, render

MOST_LOGPROBS = 20
GREEDY = 1e-5
"""A temperature below which nothing is left to chance."""
DEFAULT_MAX_TOKENS = 16
"""Of plain completions, as in vLLM; a chat goes on until it ends or the context is full."""
RANK_HEADER = "x-data-parallel-rank"


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was understood, and is not submitted yet."""

    model: str
    namespace: Namespace
    prompts: list[list[int]]
    wish: AnswerWish
    n: int
    rank: int | None
    priority: int
    hints: AskedHints
    name: str
    """Further input of its answers' random text."""
    named_tool: bool = False
    """True if the request chose the tool itself."""
    stream: bool = False
    include_usage: bool = False
    usage_always: bool = False
    logprobs: int | None = None
    """Number of alternatives per token; ``None`` for no log probabilities at all."""
    echo: bool = False
    token_ids: bool = False
    role: str = "assistant"
    """Role of the answer's turn."""
    block_size: int = 16
    transfer: TransferWish | None = None
    """Hand-over fields."""


def refuse(message: str, field: str = "", status: int = 400, **headers: str) -> Refusal:
    """Return a refusal about ``field``."""
    return Refusal(status, message, field=field, **headers)


class MockIntake(msgspec.Struct, eq=False):
    """Reads requests for one worker."""

    worker: MockWorker
    tokenizer: Tokenizer

    def completion(self, body: CompletionRequest, headers: Mapping[str, str]) -> Taken:
        """Return a plain completion. Raises ``Refusal``."""
        if body.logprobs is not None and not 0 <= body.logprobs <= MOST_LOGPROBS:
            raise refuse(f"logprobs must be from 0 to {MOST_LOGPROBS}, got {body.logprobs}", "logprobs")
        if body.suffix is not None:
            raise refuse("suffix is not currently supported", "suffix")
        if body.prompt is None or body.prompt == "":
            raise refuse("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
        prompts = self._prompts(body.prompt, body.add_special_tokens)
        most = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        taken = self._take(
            body, prompts, most, _schema(body.response_format), headers, whole=body.max_tokens is not None
        )
        return msgspec.structs.replace(taken, logprobs=body.logprobs, echo=bool(body.echo))

    def chat(self, body: ChatRequest, headers: Mapping[str, str]) -> Taken:
        """Return a chat completion. Raises ``Refusal``."""
        if body.top_logprobs is not None:
            if not 0 <= body.top_logprobs <= MOST_LOGPROBS:
                raise refuse(f"top_logprobs must be from 0 to {MOST_LOGPROBS}, got {body.top_logprobs}", "logprobs")
            if body.top_logprobs and not body.logprobs:
                raise refuse("when using `top_logprobs`, `logprobs` must be set to true", "top_logprobs")
        if body.chat_template is not None:
            raise refuse("Refused request with untrusted chat template.")
        if body.continue_final_message and body.add_generation_prompt:
            raise refuse("continue_final_message and add_generation_prompt are not compatible.")
        prompt = self.conversation(
            body.messages,
            body.tools,
            body.add_generation_prompt,
            go_on=body.continue_final_message,
            special=body.add_special_tokens,
        )
        schema = _schema(body.response_format)
        tool, named = self._tool(body, prompt)
        if tool is not None:
            schema = tool[1]
        given = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        most = self.worker.longest - len(prompt) if given is None else given
        taken = self._take(
            body, [prompt], most, schema, headers, whole=given is not None, tool=tool[0] if tool else None
        )
        likely = (body.top_logprobs or 0) if body.logprobs else None
        role = "assistant" if body.add_generation_prompt else body.messages[-1].role
        return msgspec.structs.replace(taken, logprobs=likely, named_tool=named, role=role)

    def conversation(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Any] | None,
        ask: bool,
        go_on: bool = False,
        special: bool = False,
    ) -> list[int]:
        """Return the ids of a conversation; ``special``: with what the tokenizer adds by itself. Raises ``Refusal``."""
        for index, message in enumerate(messages):
            if message.content is None and message.role in ("user", "system"):
                raise refuse("Input should be a valid string", f"messages[{index}].content", 422)
        if not messages:
            raise refuse("Cannot apply chat template to an empty conversation. Provide at least one message.")
        return self.encode(render(list(map(msgspec.structs.asdict, messages)), tools, ask, go_on), special)

    def namespace(self, model: str | None, salt: str | None = None) -> tuple[str, Namespace]:
        """Return the model's name and what sets its hashes apart. Raises ``Refusal`` for a model that isn't here."""
        worker = self.worker
        name = model or worker.config.served_model_name
        if salt == "":
            raise refuse("parameter 'cache_salt' must be a non-empty string if provided", "cache_salt")
        if name == worker.config.served_model_name:
            return name, Namespace(salt=salt)
        lora = worker.loras.get(name)
        if lora is None:
            raise refuse(f"The model `{name[:200]}` does not exist.", "model", 404)
        return name, Namespace(lora_name=lora.name, lora_path=lora.path, lora_id=lora.number, salt=salt)

    def encode(self, text: str, special: bool) -> list[int]:
        """Return the ids of a text. Raises ``Refusal`` for one that has too many, before they are made where each
        byte is one.
        """
        if isinstance(self.tokenizer, ByteTokenizer):
            self._check_length(len(text))
        return self.tokenizer.encode(text, special)

    def _check_length(self, tokens: int) -> None:
        most = self.worker.config.limits.tokens
        if tokens > most:
            raise refuse(f"a prompt may have {most} tokens, this one has {tokens}", "prompt")

    def _prompts(self, given: str | list[int | str | list[int]], special: bool) -> list[list[int]]:
        if isinstance(given, str):
            return [self.encode(given, special)]
        if not given:
            raise refuse("You must pass at least one prompt")
        kinds = set(map(type, given))
        if kinds == {int}:
            return [given]  # type: ignore[list-item]
        if len(given) > self.worker.config.max_choices:
            most = self.worker.config.max_choices
            raise refuse(f"{len(given)} choices are more than the {most} that one request may have")
        if int in kinds:
            wrong = next(index for index, item in enumerate(given) if type(item) is not type(given[0]))
            raise refuse("prompt must be a string, a list of token ids, or a list of either", f"prompt[{wrong}]", 422)
        prompts: list[list[int]] = []
        for item in given:
            prompts.append(self.encode(item, special) if isinstance(item, str) else list(item))  # type: ignore[arg-type]
        return prompts

    def _take(
        self,
        body: GenerationRequest,
        prompts: list[list[int]],
        most: int,
        schema: object,
        headers: Mapping[str, str],
        *,
        whole: bool,
        tool: str | None = None,
    ) -> Taken:
        worker = self.worker
        config = worker.config
        model, namespace = self.namespace(body.model, body.cache_salt)
        _check(body)
        n = 1 if body.n is None else body.n
        if n < 1:
            raise refuse(f"n must be at least 1, got {n}.")
        if n > 1 and body.temperature is not None and body.temperature < GREEDY:
            raise refuse(f"n must be 1 when using greedy sampling, got {n}.")
        if n * len(prompts) > config.max_choices:
            raise refuse(f"{n * len(prompts)} choices are more than the {config.max_choices} that one request may have")
        if not -(1 << 63) <= body.priority < 1 << 63:
            raise refuse("priority must fit into 64 bits", "priority")
        if body.truncate_prompt_tokens is not None:
            prompts = self._truncated(prompts, body.truncate_prompt_tokens)
        for prompt in prompts:
            self._check_prompt(prompt, body, max(1, most if whole else min(most, 1)))
        if most < 1:
            raise refuse(f"max_tokens must be at least 1, got {most}.", "max_tokens")
        if not 0 <= body.min_tokens <= most:
            raise refuse(f"min_tokens must be from 0 to max_tokens={most}, got {body.min_tokens}.")
        stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        if "" in stop:
            raise refuse("stop cannot contain an empty string.")
        options = body.stream_options
        return Taken(
            model=model,
            namespace=namespace,
            prompts=prompts,
            n=n,
            block_size=worker.block_size,
            rank=_rank(headers, config.dp_size),
            hints=read_hints(body, headers),
            priority=body.priority if config.engine.scheduling_policy == "priority" else 0,
            name=f"{model} {body.seed}",
            stream=bool(body.stream),
            include_usage=options is not None and bool(options.include_usage),
            usage_always=options is not None and bool(options.continuous_usage_stats),
            token_ids=bool(body.return_token_ids),
            transfer=None if worker.handovers is None else transfer_wish(body, worker.role),
            wish=AnswerWish(
                max_tokens=most,
                **picked(body, "min_tokens ignore_eos"),
                stop=stop,
                stop_token_ids=frozenset(body.stop_token_ids or ()),
                keeps_stop=body.include_stop_str_in_output,
                schema=schema,
                tool=tool,
            ),
        )

    def _check_prompt(self, prompt: list[int], body: GenerationRequest, output: int) -> None:
        """Refuse a prompt that has no tokens, unknown ones, or no room for ``output`` more."""
        longest, has_vocabulary = self.worker.longest, self.worker.config.tokenizer is not None
        if not prompt:
            raise refuse("The decoder prompt cannot be empty")
        self._check_length(len(prompt))
        if min(prompt) < 0:
            wrong = next(index for index, token in enumerate(prompt) if token < 0)
            raise refuse("token ids are whole numbers from 0", f"prompt[{wrong}]", 422)
        if max(prompt) >= (self.tokenizer.size if has_vocabulary else 1 << 32):
            raise refuse(f"Token id {max(prompt)} is out of vocabulary")
        if has_vocabulary and not _all_below(body.logit_bias or (), self.tokenizer.size):
            raise refuse("logit_bias contain out-of-vocab token ids.", "logit_bias")
        if len(prompt) + output > longest:
            raise refuse(
                f"This model's maximum context length is {longest} tokens. However, you requested "
                f"{len(prompt) + output} tokens ({len(prompt)} in the prompt, {output} in the "
                "completion). Please reduce the length of the prompt or completion.",
                "max_tokens" if len(prompt) < longest else "input_tokens",
            )

    def _truncated(self, prompts: list[list[int]], most: int) -> list[list[int]]:
        """Return the ends of prompts."""
        if most > self.worker.longest:
            what = f"truncate_prompt_tokens={most} cannot be greater than max_model_len = {self.worker.longest}."
            raise refuse(what, "truncate_prompt_tokens")
        return [prompt[-most:] for prompt in prompts] if most > 0 else prompts

    async def hash_long(self, taken: Taken) -> list[TokenChain | None]:
        """Hash the prompts of the choices that would hold the loop if they were hashed at once; ``None`` for others."""
        chains: list[TokenChain | None] = []
        for prompt in taken.prompts:
            for _ in range(taken.n):
                long = len(prompt) > TURN
                chains.append(await self.worker.hash_in_turns(prompt, taken.namespace) if long else None)
        return chains

    def submit(
        self,
        taken: Taken,
        chains: Sequence[TokenChain | None],
        request: str = "",
        incoming: IncomingPrompt | None = None,
    ) -> RequestFlow:
        """Hand the request's choices to the engine; ``chains`` is the result of ``hash_long``, ``request`` its client's name
        for it, and its first prompt may be ``incoming`` from another worker. Raises ``Refusal`` where too many wait already.
        """
        worker = self.worker
        config = worker.config
        if worker.waiting >= config.max_waiting:
            worker.measures.rejected()
            raise refuse(f"{config.max_waiting} requests wait already", status=503, Retry_After="1")
        flow = RequestFlow(taken.n)
        answers: list[tuple[Sequence[int], MadeAnswer]] = []
        for prompt in taken.prompts:
            most = min(taken.wish.max_tokens, worker.longest - len(prompt))
            flow.most.append(most)
            wish = msgspec.structs.replace(taken.wish, max_tokens=most)
            for number in range(taken.n):
                chain = chains[len(answers)]
                answer = compose(
                    prompt if chain is None else chain.tokens,  # packed
                    wish,
                    self.tokenizer,
                    mean=config.mean_output_tokens,
                    seed=config.seed & 0xFFFF_FFFF,
                    name=f"{taken.name} {number}",
                )
                answers.append((prompt, answer))
        rank = worker.choose_rank() if taken.rank is None else taken.rank
        keep = None if taken.transfer is None else taken.transfer.keep
        for (asked, answer), chain in zip(answers, chains, strict=True):
            worker.submit(
                flow,
                asked,
                answer,
                taken.namespace,
                rank=rank,
                priority=taken.priority,
                hints=taken.hints.of(len(asked)),
                request=request,
                keep=keep,
                incoming=incoming,
                chain=chain,
            )
            keep = incoming = None  # one prompt goes with a request, as in vLLM
        return flow

    def _tool(self, body: ChatRequest, prompt: Sequence[int]) -> tuple[tuple[str, object] | None, bool]:
        """Return the tool to call with the schema of its arguments, and whether the request named it."""
        choice = body.tool_choice
        if body.tools is not None and not body.tools:
            raise refuse("`tools` must not be an empty array.", "tools")
        if choice not in (None, "none") and body.tools is None:
            raise refuse("When using `tool_choice`, `tools` must be set.", "tool_choice")
        tools = [_function(tool, index) for index, tool in enumerate(body.tools or ())]
        if isinstance(choice, dict):
            function = choice.get("function")
            wanted = function.get("name") if isinstance(function, dict) else None
            for name, schema in tools:
                if name == wanted:
                    return (name, schema), True
            raise refuse("tool_choice names a tool that is not in tools", "tool_choice")
        if choice not in (None, "auto", "none", "required"):
            raise refuse("tool_choice must be auto, none, required, or name a function", "tool_choice")
        if not tools or choice == "none":
            return None, False
        random = Random(xxhash.xxh3_64_intdigest(repr(prompt[-64:]).encode(), 0))
        if choice != "required":
            last = body.messages[-1].role
            if last == "tool" or random.random() >= self.worker.config.tool_call_rate:
                return None, False
        return random.choice(tools), False


def transfer_wish(body: GenerationRequest, role: Role) -> TransferWish | None:
    """Return a request's hand-over fields, in vLLM's words or in SGLang's. Raises ``Refusal``."""
    params, room = body.kv_transfer_params, body.bootstrap_room
    if params and params.get("do_remote_decode"):
        return TransferWish(keep="")
    if params and params.get("do_remote_prefill"):
        return TransferWish(fetch=PromptAddress.of(params))
    if not isinstance(room, int):
        return None
    if role == "prefill":
        return TransferWish(keep=f"{ROOM}{room}")
    if not isinstance(body.bootstrap_host, str) or not isinstance(body.bootstrap_port, int):
        raise refuse("bootstrap_room needs bootstrap_host and bootstrap_port", "bootstrap_host")
    address = PromptAddress(host=body.bootstrap_host, port=body.bootstrap_port, key=f"{ROOM}{room}")
    return TransferWish(fetch=address, awaited=True)


_RANGES = (
    ("temperature", 0.0, 2.0, "temperature"),
    ("top_p", 0.0, 1.0, "top_p"),
    ("min_p", 0.0, 1.0, ""),
    ("frequency_penalty", -2.0, 2.0, ""),
    ("presence_penalty", -2.0, 2.0, ""),
    ("repetition_penalty", 0.0, float("inf"), ""),
)
"""Sampling parameters, from where to where they go, and what vLLM's refusal calls them."""
_ABOVE_0 = ("top_p", "repetition_penalty")


def _check(body: GenerationRequest) -> None:
    """Raise ``Refusal`` for sampling parameters outside of their ranges."""
    for name, low, high, field in _RANGES:
        value = getattr(body, name)
        if value is not None and not (low <= value <= high and (value or name not in _ABOVE_0)):
            raise refuse(
                f"{name} must be {'above' if name in _ABOVE_0 else 'from'} {low:g} to {high:g}, got {value}.", field
            )
    if body.top_k is not None and body.top_k < -1:
        raise refuse(f"top_k must be 0 (disable), or at least 1, got {body.top_k}.")
    if body.seed is not None and not -(1 << 63) <= body.seed < 1 << 63:
        raise refuse("seed must fit into 64 bits", "seed", 422)
    if body.allowed_token_ids is not None and not body.allowed_token_ids:
        raise refuse("allowed_token_ids is not None and empty!", "allowed_token_ids")
    if body.stream_options is not None and not body.stream:
        raise refuse("Stream options can only be defined when `stream=True`.", "stream_options")


def _all_below(tokens: Iterable[str], size: int) -> bool:
    return all(token.isdecimal() and int(token) < size for token in tokens)


def _rank(headers: Mapping[str, str], ranks: int) -> int | None:
    text = headers.get(RANK_HEADER)
    if text is None:
        return None
    if not text.isascii() or not text.isdecimal():
        return None  # vLLM takes no notice of it
    if len(text) > 6 or int(text) >= ranks:
        raise refuse(f"data_parallel_rank {text[:20]} is out of range [0, {ranks}).")
    return int(text)


def _schema(given: Mapping[str, Any] | None) -> object:
    """Return the JSON schema that a response format asks for; ``None`` for words."""
    if given is None or given.get("type") in (None, "text"):
        return None
    if given["type"] == "json_object":
        return {"type": "object", "properties": {"answer": {"type": "string"}}}
    if given["type"] == "json_schema":
        inner = given.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if isinstance(schema, dict):
            return schema
        raise refuse("response_format needs json_schema.schema", "response_format")
    raise refuse("response_format must be of type text, json_object or json_schema", "response_format.type", 422)


def _function(tool: Mapping[str, Any], index: int) -> tuple[str, object]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise refuse(f"tools[{index}] must be a function with a name", f"tools[{index}].function", 422)
    return function["name"], function.get("parameters") or {"type": "object", "properties": {}}
