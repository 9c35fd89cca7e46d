"""The body of /v1/responses, field by field."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from slipstream.serve import published
from slipstream.serve.body import Addressed, Body
from slipstream.serve.schema import Count, Effort, Function, JsonSchema, Probability, RefusalPart, SpeculationOptions


class InputText(Body):
    others = published.PART
    type: Literal["input_text", "output_text", "summary_text", "reasoning_text", "text"]
    text: str


class InputImage(Body):
    others = published.PART
    type: Literal["input_image"]
    image_url: str = Field(description="A data: URL, or an address at a host that the server's operator allowed.")
    detail: Literal["auto", "low", "high", "original"] | None = Field(None, description="Left to the processor.")


Content = str | list[Annotated[InputText | RefusalPart | InputImage, Field(discriminator="type")]]


class InputMessage(Body):
    others = published.ITEM
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class InputCall(Body):
    others = published.ITEM
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class InputResult(Body):
    """What a called function returned."""

    others = published.ITEM
    type: Literal["function_call_output"]
    call_id: str
    output: Content


class InputReasoning(Body):
    """The model's reasoning; that of other servers, which they encrypt, has no text."""

    others = published.ITEM | dict.fromkeys(("encrypted_content",))
    type: Literal["reasoning"]
    summary: list[InputText] | None = None
    content: list[InputText] | None = None


class InputReference(Body):
    """The id of an item of an earlier response that is kept here."""

    type: Literal["item_reference"] = "item_reference"
    id: str


def _type_of(item: Any) -> str:
    """Return the type of an item: without one, it is a message, or a reference if it has no role."""
    if not isinstance(item, dict):
        return str(getattr(item, "type", "message"))
    return str(item.get("type") or ("item_reference" if "id" in item and "role" not in item else "message"))


Kept = InputMessage | InputCall | InputResult | InputReasoning  # what a conversation consists of
Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputResult, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")]
    | Annotated[InputReference, Tag("item_reference")],
    Discriminator(_type_of),
]


class ResponseTool(Function):
    type: Literal["function"]


class ResponseNamespace(Body):
    """Functions under one name, as Codex sends those of an MCP server."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[ResponseTool]


class ResponseToolChoice(Body):
    type: Literal["function"]
    name: str


class TextFormat(JsonSchema):
    type: Literal["text", "json_object", "json_schema"]


class TextSettings(Body):
    others = published.TEXT_SETTINGS
    format: TextFormat | None = None


class ReasoningSettings(Body):
    others = published.REASONING_SETTINGS
    effort: Effort | None = None


class ResponsesRequest(Addressed):
    """The body of /v1/responses. Unless `store` is false, the response is kept for a while, to go on with it."""

    others = published.RESPONSES
    input: str | list[Item]
    previous_response_id: str | None = Field(None, description="The response that this one goes on with.")
    instructions: str | None = None
    tools: list[Annotated[ResponseTool | ResponseNamespace, Field(discriminator="type")]] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningSettings | None = None
    max_output_tokens: Count | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: Probability | None = None
    ignore_eos: bool | None = Field(None, description="As in vLLM, for measurements.")
    stream: bool | None = None
    store: bool | None = None
    text: TextSettings | None = None
    metadata: dict[str, str] | None = None
    speculative: bool | SpeculationOptions | None = None

    def functions(self) -> dict[str, tuple[ResponseTool, str | None]]:
        """Return each function and its namespace by the name under which the model calls it."""
        spaces = [
            (tool.tools, tool.name) if isinstance(tool, ResponseNamespace) else ([tool], None)
            for tool in self.tools or ()
        ]
        return {qualified_name(tool.name, space): (tool, space) for tools, space in spaces for tool in tools}


def qualified_name(name: str, namespace: str | None) -> str:
    return f"{namespace}__{name}" if namespace else name
