"""The answers of the server: the objects of OpenAI's interface, with the further fields that tools already read."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Answer(BaseModel):
    """A JSON object that the server writes. Fields that may be empty have a default, and are left out then."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    def as_json(self) -> dict[str, Any]:
        """Return the answer as a JSON object, without fields that are None."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class Error(Answer):
    """An error: its message, kind and code, and the field of the request it is about."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(Answer):
    """The body of every error."""

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

    mean_acceptance_length: float | None = None
    draft_acceptance_rate: float | None = None
    acceptance_histogram: list[int]
    acceptance_histogram_by_draft_length: dict[str, list[int]]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    per_step_accepted: list[int] | None = None
    per_step_drafted: list[int] | None = None


class Metrics(Answer):
    """Times of one answer, in milliseconds, and the acceptance of its drafts."""

    time_to_first_token_ms: float | None = None
    generation_time_ms: float | None = None
    queue_time_ms: float | None = None
    mean_itl_ms: float | None = None
    tokens_per_second: float | None = None
    speculative_decoding: SpeculativeDecoding | None = None


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
    token: int | None = None
    source: str
    refused: list[str] = Field(default_factory=list)


class TopLogprob(Answer):
    """A token that was possible at a position, with its log probability."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob):
    """The token that was sampled, and the most probable ones at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    """Log probabilities of a chat's answer, under the law that was really sampled from."""

    content: list[TokenLogprob] | None = None
    refusal: None = None


class TextLogprobs(Answer):
    """Log probabilities of a completion, in the older form."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None = None


class Common(Answer):
    """The fields that all answers have besides their choices."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage | None = None
    metrics: Metrics | None = None
    timings: Timings | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the answer as a JSON object; fields that clients expect in every choice are null where empty."""
        found = super().as_json()
        for choice in found["choices"]:
            choice.setdefault("finish_reason", None)
            choice.setdefault("logprobs", None)
            if "message" in choice:
                choice["message"].setdefault("content", None)
        return found


class TextChoice(Answer):
    """One of the answers to a completion request; `score` is that of beam search."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None
    explained: list[Explained] | None = None
    score: float | None = None


class CompletionAnswer(Common):
    """The answer of /v1/completions, also as the chunk of a stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]


class FunctionCallAnswer(Answer):
    """The name of the called function, and its arguments as JSON text."""

    name: str | None = None
    arguments: str


class ToolCallAnswer(Answer):
    """A call of a tool; `index` is given in streams."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCallAnswer
    index: int | None = None


class AssistantMessage(Answer):
    """A message of the model: content, reasoning and tool calls."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = None
    refusal: None = None
    tool_calls: list[ToolCallAnswer] | None = None


class ChatChoice(Answer):
    """One of the answers to a chat."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    explained: list[Explained] | None = None


class ChatAnswer(Common):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class Delta(Answer):
    """The part of a message that a chunk adds."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallAnswer] | None = None


class ChatChunkChoice(Answer):
    """The part of one of the answers that a chunk adds."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    explained: list[Explained] | None = None


class ChatChunk(Common):
    """A chunk of a streamed chat."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]


class Model(Answer):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "slipstream"
    max_model_len: int | None = None


class Models(Answer):
    """All models that are served."""

    object: Literal["list"] = "list"
    data: list[Model]


class Tokenized(Answer):
    """The tokens of a text, and their number."""

    count: int
    max_model_len: int | None = None
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Answer):
    """The text of tokens."""

    prompt: str


class Health(Answer):
    """The status of a server that takes requests."""

    status: Literal["ok"] = "ok"


class Version(Answer):
    """The version of the server."""

    version: str


class Properties(Answer):
    """The properties of the server: its models, how drafts are made and accepted, and the notes of loading."""

    target: str
    draft: str | None = None
    rule: str
    lossless: bool
    gamma: int
    max_rows: int
    max_model_len: int | None = None
    vocabulary: int
    encoder_decoder: bool
    chat: bool
    notes: list[str]
    acceptance_by_position: list[float]
    recommended_gamma: int | None = None
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
    """The answer of /v1/audio/transcriptions as verbose_json; `duration` in seconds."""

    task: str
    language: str
    duration: float
    text: str
    segments: list[TranscriptionSegment]


class Transcription(Answer):
    """The answer of /v1/audio/transcriptions."""

    text: str
