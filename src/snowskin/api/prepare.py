"""From a body to generations: parse, check, template, tokenise, hash. Runs in a worker thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from snowskin.api.config import ApiConfig
from snowskin.api.errors import ApiError, shown
from snowskin.api.parsing import parse_body
from snowskin.api.plans import Plan, Prompt, new_request_id, of_choice, sampling_of
from snowskin.api.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    Message,
    TokenizeBody,
)
from snowskin.api.tokenizer import TextTokenizer
from snowskin.terms.keys import prompt_keys
from snowskin.terms.request import GenerationRequest
from snowskin.terms.serving import ServingInfo

LONGEST_TOKEN_ID = 20
"""Digits of a token id in ``logit_bias``; the greatest of 64 bits has so many."""


class Preparer:
    """Makes plans of bodies. Holds no state of its own; its methods may run in any thread."""

    def __init__(self, info: ServingInfo, tokenizer: TextTokenizer, config: ApiConfig) -> None:
        self._info = info
        self._tokenizer = tokenizer
        self._config = config

    def chat(self, raw: bytes) -> Plan:
        """The plan of a body for ``/v1/chat/completions``.

        Raises:
            ApiError: 400 or 404.
        """
        body = parse_body(raw, ChatBody)
        self._check_model(body.model)
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(
                f"'top_logprobs' is {body.top_logprobs}, but it needs 'logprobs': true.",
                param="top_logprobs",
            )
        tokens = self._chat_tokens(body.messages, body.add_generation_prompt, body)
        limit = self._output_limit(
            len(tokens),
            asked=body.max_completion_tokens or body.max_tokens,
            default=self._config.chat_output_tokens,
            param="messages",
        )
        top = (body.top_logprobs or 0) if body.logprobs else None
        choices = self._choices(body, tokens, limit, top)
        return self._plan(body, (Prompt(tokens, choices),), logprobs=body.logprobs)

    def completion(self, raw: bytes) -> Plan:
        """The plan of a body for ``/v1/completions``.

        Raises:
            ApiError: 400 or 404.
        """
        body = parse_body(raw, CompletionBody)
        self._check_model(body.model)
        if body.echo and body.logprobs is not None:
            raise ApiError(
                "'echo' together with 'logprobs' is not supported by this server: it keeps no "
                "log-probabilities of the prompt. Leave one of them out.",
                code="unsupported_parameter",
                param="echo",
            )
        given = _prompts(body)
        if len(given) * body.n > self._config.max_choices:
            raise ApiError(
                f"{len(given)} prompts with n = {body.n} are {len(given) * body.n} generations; "
                f"one request may ask for {self._config.max_choices}.",
                param="prompt",
            )
        return self._plan(
            body,
            tuple(self._prompt(body, each) for each in given),
            logprobs=body.logprobs is not None,
        )

    def tokenize(self, raw: bytes) -> dict[str, Any]:
        """The answer of ``/tokenize``."""
        body = parse_body(raw, TokenizeBody)
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError("Give either 'prompt' or 'messages'.", param="prompt")
        if body.messages is not None:
            tokens: Sequence[int] = self._chat_tokens(
                body.messages, body.add_generation_prompt, body
            )
        else:
            tokens = self._tokenizer.encode(
                body.prompt or "", add_special_tokens=body.add_special_tokens
            )
        return {
            "tokens": list(tokens),
            "count": len(tokens),
            "max_model_len": self._info.max_context_tokens,
        }

    def detokenize(self, raw: bytes) -> dict[str, Any]:
        """The answer of ``/detokenize``."""
        body = parse_body(raw, DetokenizeBody)
        self._check_model(body.model)
        self._check_ids(body.tokens, "tokens")
        return {"prompt": self._tokenizer.decode(body.tokens, skip_special_tokens=False)}

    def _check_model(self, model: str | None) -> None:
        if model is not None and model != self._info.model:
            raise model_not_found(model, self._info.model)

    def _chat_tokens(
        self, messages: Sequence[Message], open_turn: bool, body: ChatBody | TokenizeBody
    ) -> tuple[int, ...]:
        template = self._tokenizer.chat_template
        if template is None:
            raise ApiError(
                f"The model {self._info.model!r} has no chat template. Use /v1/completions and "
                "write its prompt in full.",
                code="no_chat_template",
                param="messages",
            )
        text = template.render(
            [message.plain() for message in messages],
            add_generation_prompt=open_turn,
            variables=body.chat_template_kwargs,
        )
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _prompt(self, body: CompletionBody, given: str | Sequence[int]) -> Prompt:
        if isinstance(given, str):
            ids = self._tokenizer.encode(given, add_special_tokens=body.add_special_tokens)
            tokens = tuple(ids)
        else:
            self._check_ids(given, "prompt")
            tokens = tuple(given)
        limit = self._output_limit(
            len(tokens),
            asked=body.max_tokens,
            default=self._config.completion_output_tokens,
            param="prompt",
        )
        echo = ""
        if body.echo:
            echo = given if isinstance(given, str) else self._tokenizer.decode(tokens)
        choices = self._choices(body, tokens, limit, body.logprobs)
        return Prompt(tokens, choices, context=tokens[-8:], echo=echo)

    def _check_ids(self, ids: Sequence[int], param: str) -> None:
        vocab_size = self._info.vocab_size
        for token in ids:
            if not 0 <= token < vocab_size:
                raise ApiError(
                    f"Invalid token id in '{param}': {token}. Expected: 0 <= id < {vocab_size}.",
                    param=param,
                )

    def _output_limit(
        self, prompt_tokens: int, *, asked: int | None, default: int, param: str
    ) -> int:
        context = self._info.max_context_tokens
        if prompt_tokens == 0:
            raise ApiError(f"'{param}' has no tokens; at least one is needed.", param=param)
        if prompt_tokens + (asked or 1) > context:
            wanted = f"{asked} tokens" if asked else "at least 1 token"
            raise ApiError(
                f"The prompt has {prompt_tokens} tokens and {wanted} of output are asked for, "
                f"{prompt_tokens + (asked or 1)} together; the model's context is {context} tokens."
                " Shorten the prompt or ask for less output.",
                code="context_length_exceeded",
                param=param,
            )
        return asked or min(default, context - prompt_tokens)

    def _choices(
        self, body: GenerationBody, tokens: tuple[int, ...], limit: int, top: int | None
    ) -> tuple[GenerationRequest, ...]:
        if body.min_tokens > limit:
            raise ApiError(
                f"Invalid value for 'min_tokens': {body.min_tokens}. Expected: at most the output "
                f"limit, which is {limit} here.",
                param="min_tokens",
            )
        self._check_ids(body.stop_token_ids, "stop_token_ids")
        space = self._info.key_space
        if body.cache_salt is not None:
            space = msgspec.structs.replace(space, tenant_salt=body.cache_salt)
        keys = prompt_keys(space, tokens)
        ends = () if body.ignore_eos else self._info.stop_tokens
        sampling = sampling_of(body, self._info.sampling, self._logit_bias(body), top)
        return tuple(
            GenerationRequest(
                request=new_request_id(),
                tokens=tokens,
                keys=keys,
                output_limit_tokens=limit,
                sampling=of_choice(sampling, choice),
                stop_tokens=tuple(dict.fromkeys((*ends, *body.stop_token_ids))),
                min_output_tokens=body.min_tokens,
                root=space.root(),
            )
            for choice in range(body.n)
        )

    def _logit_bias(self, body: GenerationBody) -> dict[int, float]:
        biases = {}
        for name, bias in body.logit_bias.items():
            if not (_is_number(name) and int(name) < self._info.vocab_size):
                raise ApiError(
                    f"Invalid key in 'logit_bias': {shown(name)}. Expected: a token id, "
                    f"0 <= id < {self._info.vocab_size}.",
                    param="logit_bias",
                )
            biases[int(name)] = bias
        return biases

    def _plan(self, body: GenerationBody, prompts: tuple[Prompt, ...], *, logprobs: bool) -> Plan:
        if body.stream_options is not None and not body.stream:
            raise ApiError(
                "'stream_options' is only allowed with 'stream': true.", param="stream_options"
            )
        if body.n > self._config.max_choices:
            raise ApiError(
                f"Invalid value for 'n': {body.n}. Expected: an integer with "
                f"1 <= n <= {self._config.max_choices}.",
                param="n",
            )
        return Plan(
            model=self._info.model,
            prompts=prompts,
            stop_strings=body.stop_strings,
            stream=body.stream,
            include_usage=body.stream_options is not None and body.stream_options.include_usage,
            logprobs=logprobs,
        )


def model_not_found(asked: str, served: str) -> ApiError:
    """The answer to a model that is not the served one."""
    return ApiError(
        f"The model {shown(asked)} does not exist here; {served!r} is served.",
        status=404,
        code="model_not_found",
        param="model",
    )


def _is_number(name: str) -> bool:
    """Whether ``name`` is a number that is cheap to read."""
    return len(name) <= LONGEST_TOKEN_ID and name.isascii() and name.isdigit()


def _prompts(body: CompletionBody) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [each for each in prompt if isinstance(each, str | list)]
