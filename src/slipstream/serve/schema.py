"""The bodies of requests, field by field."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, create_model, model_serializer, model_validator

from slipstream.core.options import OPTIONS, Bounds, Option
from slipstream.serve import published
from slipstream.serve.body import Addressed, Body, FieldError, complaint
from slipstream.serve.faults import BadRequest

Probability = Annotated[float, Field(gt=0, le=1)]
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]
Count = Annotated[int, Field(ge=1, lt=1 << 31)]
Text = Annotated[str, Field(min_length=1)]
TOOL_NAME = r"^[a-zA-Z0-9_.-]{1,128}$"  # names that tools may have
ToolName = Annotated[str, Field(pattern=TOOL_NAME)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(Body):
    """The options of a stream: what it sends besides the text."""

    others = published.STREAM_OPTIONS
    include_usage: bool = Field(False, description="Send a last chunk with the usage of the whole request.")
    continuous_usage_stats: bool = Field(False, description="Send the usage so far with every chunk.")


class SpeculationOptions(Body):
    """The decoding of this request: its draft length, its acceptance rule, and what the answer reports of it."""

    gamma: int | None = Field(None, ge=0, le=1024, description="Tokens to draft per round; 0 decodes plainly.")
    verify: str | None = Field(None, description="The acceptance rule: token, block, match, coupled, gbv:K, lenient:L.")
    draft: str | None = Field(None, description="The draft that is expected to run; another one is an error.")
    lossless: bool | None = Field(None, description="Refuse what would change the target's distribution.")
    explain: bool = Field(False, description="Tell the source of every token, and the refused ones.")
    detailed: bool = Field(False, description="Tell what every round drafted and accepted.")


class StructuredOutputs(Body):
    """The form of the answer: exactly one of these fields is given."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="A JSON schema.")
    regex: str | None = None
    choice: list[Text] | None = Field(None, min_length=1)
    grammar: str | None = Field(None, description="A grammar in llguidance's Lark dialect.")


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of the answer: free text, any JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="That of a json_object, for llama.cpp's.")


class TextPart(Body):
    others = published.PART
    type: Literal["text"]
    text: str


class RefusalPart(Body):
    """A text by which the assistant refused; models are shown it as any other."""

    others = published.PART
    type: Literal["refusal"]
    refusal: str

    @model_serializer
    def _as_text(self) -> dict[str, str]:
        return {"type": "text", "text": self.refusal}


class ImageUrl(Body):
    """The address of an image: a data: URL that holds it, or a host that the operator allowed."""

    url: str = Field(description="A data: URL, or an address at a host that the server's operator allowed.")
    detail: Literal["auto", "low", "high", "original"] | None = Field(None, description="Left to the processor.")


class ImagePart(Body):
    others = published.PART
    type: Literal["image_url"]
    image_url: ImageUrl | str


class InputAudio(Body):
    """A sound, in the request itself."""

    data: str = Field(description="The file, in base64.")
    format: Literal["wav", "flac", "mp3", "ogg"] = Field(description="WAV always works; others need soundfile.")


class AudioPart(Body):
    others = published.PART
    type: Literal["input_audio"]
    input_audio: InputAudio


Part = Annotated[TextPart | RefusalPart | ImagePart | AudioPart, Field(discriminator="type")]


class PredictedOutput(Body):
    """A text that the answer is expected to resemble: drafts copy from it as long as the target agrees."""

    type: Literal["content"]
    content: str | list[TextPart]


SAME_AS = {other: each.field for each in OPTIONS.values() for other in each.also if each.field}
"""Fields that other projects call differently -> our names for them."""

KINDS = {list[str]: Text | list[Text], list[int]: list[TokenId], dict[int, float]: dict[str, Bias], str: Text}
"""The kinds of options that are not their own types in a body."""


def field_of(option: Option, description: str) -> Any:
    bounds = Bounds.read(option.served or option.bounds)
    limits: dict[str, Any] = {"gt" if bounds.open else "ge": bounds.least, "le": bounds.most}
    whole = {name: option.kind(bound) for name, bound in limits.items() if math.isfinite(bound) and option.is_number}
    return KINDS.get(option.kind, option.kind) | None, Field(None, description=description, **whole)


def fields_of(*groups: str) -> dict[str, Any]:
    asked = [each for each in OPTIONS.values() if each.field and each.group in groups]
    others = {other: field_of(each, f"The same as {each.field}.") for each in asked for other in each.also}
    return {str(each.field): field_of(each, each.help) for each in asked} | others


Sampled: Any = create_model("Sampled", __base__=Addressed, **fields_of("sampling", "samples", "service"))
Searched: Any = create_model("Searched", __base__=Body, **fields_of("beams"))


GUIDED = {f"guided_{form}": form for form in ("json", "regex", "choice", "grammar")}
FORMS = GUIDED | {"json_schema": "json", "regex": "regex"}  # other names for the forms of `structured_outputs`


class Decoding(Sampled):
    """The fields of every request for text."""

    others = published.REQUEST
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = Field(None, description="structured_outputs.json, as vLLM called it.")
    guided_regex: str | None = Field(None, description="structured_outputs.regex.")
    guided_choice: list[Text] | None = Field(None, min_length=1, description="structured_outputs.choice.")
    guided_grammar: str | None = Field(None, description="structured_outputs.grammar.")
    json_schema: dict[str, Any] | str | None = Field(None, description="structured_outputs.json, as SGLang calls it.")
    regex: str | None = Field(None, description="structured_outputs.regex.")
    prediction: PredictedOutput | None = None
    cache_prompt: bool | None = Field(None, description="Whether a cached prefix may be used; true without it.")
    timings_per_token: bool | None = Field(None, description="Send `timings` with every chunk of a stream.")
    speculative: bool | SpeculationOptions | None = None

    @model_validator(mode="after")
    def _under_one_name(self) -> Self:
        """Move what came under another project's name to our own. Raises FieldError for two different values."""
        for other, own in SAME_AS.items():
            if (value := getattr(self, other, None)) is not None:
                if getattr(self, own) not in (None, value):
                    raise FieldError(other, f"{own} and {other} are one thing: give one of them.")
                setattr(self, own, value)
        for name, form in FORMS.items():
            if (value := getattr(self, name)) is not None:
                if self.structured_outputs not in (None, asked := StructuredOutputs(**{form: value})):
                    raise FieldError(name, "structured_outputs has it too: give one of them.")
                self.structured_outputs = asked
        return self

    if TYPE_CHECKING:  # the fields of `Sampled`

        def __getattr__(self, name: str) -> Any: ...


class CompletionRequest(Decoding, Searched):
    """The body of /v1/completions. For an encoder-decoder, the prompt is the source."""

    others = published.REQUEST | published.COMPLETION
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    suffix: str | None = Field(None, description="The text after the answer, for models that fill in.")
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, description="With echo, the prompt is scored too.")
    best_of: int | None = Field(None, ge=1, description="Write so many, and answer with the n most probable ones.")
    use_beam_search: bool | None = Field(None, description="Search with best_of (or n) beams, and answer with n texts.")


class ExtraFile(Body):
    """A text of another file, as context."""

    others = published.EXTRA_FILE
    filename: str | None = None
    text: str


class InfillRequest(Decoding):
    others = published.REQUEST | published.INFILL
    input_prefix: str | None = None
    input_suffix: str | None = None
    input_extra: list[ExtraFile] | None = None
    prompt: str | None = Field(None, description="What follows the prefix.")
    t_max_predict_ms: int | None = Field(None, ge=0, description="max_time, in milliseconds.")
    response_fields: list[str] | None = Field(None, description="Answer with these alone, such as timings/draft_n.")


class FunctionCall(Body):
    """The function that a message calls; its arguments are JSON text, or an object, as some clients send them."""

    others = published.TOOL
    name: str
    arguments: str | dict[str, Any]


class ToolCall(Body):
    others = published.TOOL
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """A message of a chat: its role, its content, and its tool calls."""

    others = published.MESSAGE
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="reasoning_content, as vLLM calls it.")

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and self.role not in ("assistant", "tool"):
            raise FieldError("content", "only messages of the assistant or tools may lack it: give a text, or parts.")
        return self


class Function(Body):
    others = published.TOOL
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    others = published.TOOL
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class ToolChoice(Body):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Decoding):
    others = published.REQUEST | published.CHAT
    messages: list[Message] = Field(min_length=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = Field(None, description="For chat templates that know it; none: do not think.")
    add_generation_prompt: bool | None = Field(None, description="Begin the assistant's message; true without it.")
    continue_final_message: bool | None = Field(None, description="Go on with the last message, which stays open.")

    @staticmethod
    def of(body: dict[str, Any]) -> ChatRequest:
        try:
            return ChatRequest.model_validate(body)
        except ValidationError as error:
            raise BadRequest(*complaint(error.errors(), body)) from None


class TokenizeRequest(Addressed):
    others = published.TOKENIZE
    prompt: str | None = None
    content: str | None = Field(None, description="prompt, as llama.cpp calls it, without special tokens of itself.")
    messages: list[Message] | None = Field(None, min_length=1)
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool = True
    add_special: bool = False
    return_token_strs: bool = False
    with_pieces: bool = Field(False, description="Each token as an object with its id and piece, as in llama.cpp.")


class DetokenizeRequest(Addressed):
    tokens: list[TokenId]
