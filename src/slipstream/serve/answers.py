"""The answers of the server: the objects of OpenAI's interface, with the further fields that tools already read."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

_IDS = Random()  # seeded by the operating system; asking that each time costs a wait for the interpreter's lock


def new_id() -> str:
    return f"{_IDS.getrandbits(128):032x}"


def new_call_id() -> str:
    """Return a new id for a call of a tool: of nine characters, since the chat templates of Mistral take no others."""
    return f"{_IDS.getrandbits(36):09x}"


Value = TypeVar("Value")

Sometimes = Annotated[Value | None, Field(exclude_if=lambda value: value is None)]
"""A field that is left out of the JSON text where it is None; other empty fields are written as null."""


class Answer(BaseModel):
    """A JSON object that the server writes."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    def json_text(self) -> str:
        """Return the answer as JSON text in ASCII; numbers that are not finite, which JSON lacks, are null."""
        # Some clients of event streams take U+2028 and U+0085 for the end of a line: escaped, they are none.
        return self.model_dump_json(by_alias=True, ensure_ascii=True)


class Error(Answer):
    """An error: its message, kind and code, and the field of the request it is about."""

    message: str
    type: str
    param: Sometimes[str] = None
    code: Sometimes[str] = None
    details: Sometimes[dict[str, str]] = None


class ErrorAnswer(Answer):
    error: Error


class PromptDetails(Answer):
    """The tokens of the prompt that came from the prefix cache."""

    cached_tokens: int = 0


class CompletionDetails(Answer):
    """The tokens proposed by the field `prediction` that were accepted and rejected."""

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    reasoning_tokens: int = 0
    audio_tokens: int = 0


class Usage(Answer):
    """The numbers of tokens read and written, over all answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails = Field(default_factory=PromptDetails)
    completion_tokens_details: CompletionDetails = Field(default_factory=CompletionDetails)


class SpeculativeDecoding(Answer):
    """Acceptance of drafts for one answer, under the names that vLLM and its tools use."""

    mean_acceptance_length: Sometimes[float] = None
    draft_acceptance_rate: Sometimes[float] = None
    acceptance_histogram: list[int]
    acceptance_histogram_by_draft_length: dict[str, list[int]]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    per_step_accepted: Sometimes[list[int]] = None
    per_step_drafted: Sometimes[list[int]] = None


class AnswerMetrics(Answer):
    """Times of one answer, in milliseconds, and the acceptance of its drafts."""

    time_to_first_token_ms: Sometimes[float] = None
    generation_time_ms: Sometimes[float] = None
    queue_time_ms: Sometimes[float] = None
    mean_itl_ms: Sometimes[float] = None
    tokens_per_second: Sometimes[float] = None
    speculative_decoding: Sometimes[SpeculativeDecoding] = None


class Timings(Answer):
    """Times of one answer under llama.cpp's names."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int
    draft_n_accepted: int


class Explained(Answer):
    """A token, its source, and the tokens that the draft had proposed in its place if they were refused."""

    text: str
    token: Sometimes[int] = None
    source: str
    refused: list[str] = Field(default_factory=list)


class TopLogprob(Answer):
    token: str
    logprob: float
    bytes: Sometimes[list[int]] = None


class TokenLogprob(TopLogprob):
    """The token that was sampled, and the most probable ones at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    """Log probabilities of a chat's answer, under the law that was really sampled from."""

    content: Sometimes[list[TokenLogprob]] = None
    refusal: None = None


class TextLogprobs(Answer):
    """Log probabilities of a completion, in the older form."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: Sometimes[list[dict[str, float] | None]] = None


class Common(Answer):
    """The fields that all answers have besides their choices."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Sometimes[Usage] = None
    metrics: Sometimes[AnswerMetrics] = None
    timings: Sometimes[Timings] = None


class TextChoice(Answer):
    """One of the answers to a completion request; `score` is that of beam search."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None
    explained: Sometimes[list[Explained]] = None
    score: Sometimes[float] = None


class CompletionAnswer(Common):
    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]


class FilledIn(Answer):
    """The answer of /infill, also as the event of a stream, whose last one has all fields but the text."""

    model_config = ConfigDict(extra="allow")
    content: Sometimes[str] = None
    stop: Sometimes[bool] = None
    model: Sometimes[str] = None
    stop_type: Sometimes[str] = None
    truncated: Sometimes[bool] = None
    tokens_predicted: Sometimes[int] = None
    tokens_evaluated: Sometimes[int] = None
    tokens_cached: Sometimes[int] = None
    timings: Sometimes[Timings] = None

    def picked(self, fields: Iterable[str]) -> FilledIn:
        """Return the answer with these fields alone; timings/draft_n is a field of a field. Others are left out."""
        whole, found = self.model_dump(), dict[str, object]()
        for name in fields:
            outer, _, inner = name.partition("/")
            value = (whole.get(outer) or {}).get(inner) if inner else whole.get(outer)
            found |= {} if value is None else {name: value}
        return FilledIn(**found)


class FunctionCallAnswer(Answer):
    name: Sometimes[str] = None
    arguments: str


class ToolCallAnswer(Answer):
    """A call of a tool; `index` is given in streams."""

    id: Sometimes[str] = None
    type: Literal["function"] = "function"
    function: FunctionCallAnswer
    index: Sometimes[int] = None


class AssistantMessage(Answer):
    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: Sometimes[str] = None
    refusal: None = None
    tool_calls: Sometimes[list[ToolCallAnswer]] = None


class ChatChoice(Answer):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    explained: Sometimes[list[Explained]] = None


class ChatAnswer(Common):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class Delta(Answer):
    """The part of a message that a chunk adds."""

    role: Sometimes[Literal["assistant"]] = None
    content: Sometimes[str] = None
    reasoning_content: Sometimes[str] = None
    tool_calls: Sometimes[list[ToolCallAnswer]] = None


class ChatChunkChoice(Answer):
    """The part of one of the answers that a chunk adds."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    explained: Sometimes[list[Explained]] = None


class ChatChunk(Common):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]


class Model(Answer):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "slipstream"
    max_model_len: Sometimes[int] = None


class Models(Answer):
    object: Literal["list"] = "list"
    data: list[Model]


class TokenPiece(Answer):
    """A token and its text."""

    id: int
    piece: str


class Tokenized(Answer):
    """The tokens of a text, and their number."""

    count: int
    max_model_len: Sometimes[int] = None
    tokens: list[int] | list[TokenPiece]
    token_strs: Sometimes[list[str]] = None


class Detokenized(Answer):
    prompt: str
    content: str


class Health(Answer):
    status: Literal["ok"] = "ok"


class Version(Answer):
    version: str


class Properties(Answer):
    """The properties of the server: its models, how drafts are made and accepted, and the notes of loading."""

    target: str
    draft: Sometimes[str] = None
    rule: str
    lossless: bool
    gamma: int
    max_rows: int
    max_model_len: Sometimes[int] = None
    vocabulary: int
    encoder_decoder: bool
    chat: bool
    notes: list[str]
    acceptance_by_position: list[float]
    recommended_gamma: Sometimes[int] = None
    running: int
    waiting: int
    version: str


class TranscriptionSegment(Answer):
    """The text spoken between two times, in seconds."""

    id: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float


class VerboseTranscription(Answer):
    task: str
    language: str
    duration: float
    text: str
    segments: list[TranscriptionSegment]


class Transcription(Answer):
    text: str
