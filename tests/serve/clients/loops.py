"""Python clients of the server: python loops.py URL CLIENT prints what the client got, as JSON.

It runs in any environment that has the client; exit code 3 says that this one has not.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

ASKED, KIND = "What are 3 and 4?", "Be kind."
MESSAGES: Any = [{"role": "system", "content": KIND}, {"role": "user", "content": ASKED}]
MISSING = 3


class Thing(BaseModel):
    color: Literal["red", "blue"]
    count: int = Field(ge=0, le=9)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def described(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


described.__name__ = "add"
NUMBERS = {name: {"type": "integer"} for name in "ab"}
FUNCTION: dict[str, Any] = {
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {"type": "object", "properties": NUMBERS, "required": ["a", "b"], "additionalProperties": False},
}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]


def result(call: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call.id, "content": str(add(**json.loads(call.function.arguments)))}


class OpenAI:
    package = "openai"

    def __init__(self, url: str) -> None:
        self.library: Any = import_module("openai")
        self.client = self.library.OpenAI(base_url=url, api_key="none", max_retries=0)

    def chat(self, messages: Any = MESSAGES, **more: Any) -> Any:
        return self.client.chat.completions.create(model="tiny", messages=messages, **more)

    def text(self) -> Any:
        return self.chat().choices[0].message.content

    def stream(self) -> Any:
        return "".join(chunk.choices[0].delta.content or "" for chunk in self.chat(stream=True))

    def structured(self) -> Any:
        parsed = self.client.chat.completions.parse(model="tiny", messages=MESSAGES, response_format=Thing)
        return parsed.choices[0].message.parsed.model_dump()

    def tools(self) -> Any:
        message = self.chat(tools=TOOLS).choices[0].message
        return self.chat([*MESSAGES, message, *map(result, message.tool_calls)], tools=TOOLS).choices[0].message.content

    def streamed_tools(self) -> Any:
        with self.client.chat.completions.stream(model="tiny", messages=MESSAGES, tools=TOOLS) as events:
            message = events.get_final_completion().choices[0].message
        messages = [*MESSAGES, message.model_dump(), *map(result, message.tool_calls)]
        with self.client.chat.completions.stream(model="tiny", messages=messages, tools=TOOLS) as events:
            return events.get_final_completion().choices[0].message.content


class OpenAIResponses:
    package = "openai"

    def __init__(self, url: str) -> None:
        self.api = import_module("openai").OpenAI(base_url=url, api_key="none", max_retries=0).responses
        self.asked: dict[str, Any] = {"model": "tiny", "instructions": KIND}

    def text(self) -> Any:
        return self.api.create(**self.asked, input=ASKED).output_text

    def stream(self) -> Any:
        events = self.api.create(**self.asked, input=ASKED, stream=True)
        return "".join(event.delta for event in events if event.type == "response.output_text.delta")

    def structured(self) -> Any:
        return self.api.parse(**self.asked, input=ASKED, text_format=Thing).output_parsed.model_dump()

    def loop(self, answer: Callable[..., Any]) -> Any:
        asked = {**self.asked, "tools": [{"type": "function", "strict": True, **FUNCTION}]}
        begun: Any = {"role": "user", "content": ASKED}
        first = answer(**asked, input=[begun])
        calls = [item for item in first.output if item.type == "function_call"]
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": str(add(**json.loads(call.arguments)))}
            for call in calls
        ]
        echoed = answer(**asked, input=[begun, *first.output, *results])
        assert echoed.output_text == answer(**asked, input=results, previous_response_id=first.id).output_text
        return echoed.output_text

    def tools(self) -> Any:
        return self.loop(self.api.create)

    def streamed_tools(self) -> Any:
        def answer(**asked: Any) -> Any:
            with self.api.stream(**asked) as events:
                return events.get_final_response()

        return self.loop(answer)


class Agents:
    package, model = "openai-agents", "OpenAIChatCompletionsModel"

    def __init__(self, url: str) -> None:
        self.library: Any = import_module("agents")
        self.library.set_tracing_disabled(True)
        client = import_module("openai").AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
        self.served = getattr(self.library, self.model)(model="tiny", openai_client=client)
        self.run = asyncio.Runner().run  # one loop for all that use the client

    def agent(self, **more: Any) -> Any:
        return self.library.Agent(name="one", instructions=KIND, model=self.served, **more)

    def text(self) -> Any:
        return self.run(self.library.Runner.run(self.agent(), ASKED)).final_output

    async def streamed(self, agent: Any) -> Any:
        run = self.library.Runner.run_streamed(agent, ASKED)
        async for _ in run.stream_events():
            pass
        return run.final_output

    def stream(self) -> Any:
        return self.run(self.streamed(self.agent()))

    def structured(self) -> Any:
        return self.run(self.library.Runner.run(self.agent(output_type=Thing), ASKED)).final_output.model_dump()

    def tools(self) -> Any:
        agent = self.agent(tools=[self.library.function_tool(add)])
        return self.run(self.library.Runner.run(agent, ASKED)).final_output

    def streamed_tools(self) -> Any:
        return self.run(self.streamed(self.agent(tools=[self.library.function_tool(add)])))


class AgentsResponses(Agents):
    model = "OpenAIResponsesModel"


class LangChain:
    package, responses = "langchain-openai", False

    def __init__(self, url: str) -> None:
        settings: dict[str, Any] = {"base_url": url, "api_key": "none", "max_retries": 0, "model": "tiny"}
        self.model = import_module("langchain_openai").ChatOpenAI(**settings, use_responses_api=self.responses)
        self.kinds: Any = import_module("langchain_core.messages")
        self.asked = [self.kinds.SystemMessage(KIND), self.kinds.HumanMessage(ASKED)]

    def text(self) -> Any:
        return self.model.invoke(self.asked).text

    def stream(self) -> Any:
        return "".join(chunk.text for chunk in self.model.stream(self.asked))

    def structured(self) -> Any:
        return self.model.with_structured_output(Thing, method="json_schema").invoke(self.asked).model_dump()

    def loop(self, answer: Callable[[Any, Any], Any]) -> Any:
        model = self.model.bind_tools([add])
        first = answer(model, self.asked)
        told = self.kinds.ToolMessage
        results = [told(str(add(**call["args"])), tool_call_id=call["id"]) for call in first.tool_calls]
        return answer(model, [*self.asked, first, *results]).text

    def tools(self) -> Any:
        return self.loop(lambda model, messages: model.invoke(messages))

    def streamed_tools(self) -> Any:
        def answer(model: Any, messages: Any) -> Any:
            first, *rest = model.stream(messages)
            return sum(rest, first)

        return self.loop(answer)


class LangChainResponses(LangChain):
    responses = True


class PydanticAI:
    package, model = "pydantic-ai-slim", "OpenAIChatModel"

    def __init__(self, url: str) -> None:
        self.library: Any = import_module("pydantic_ai")
        provider = import_module("pydantic_ai.providers.openai").OpenAIProvider(base_url=url, api_key="none")
        self.served = getattr(import_module("pydantic_ai.models.openai"), self.model)("tiny", provider=provider)

    def agent(self, **more: Any) -> Any:
        return self.library.Agent(self.served, instructions=KIND, retries=0, **more)

    def text(self) -> Any:
        return self.agent().run_sync(ASKED).output

    async def streamed(self, agent: Any) -> Any:
        async with agent.run_stream(ASKED) as run:
            return await run.get_output()

    def stream(self) -> Any:
        return asyncio.run(self.streamed(self.agent()))

    def structured(self) -> Any:
        return self.agent(output_type=self.library.NativeOutput(Thing)).run_sync(ASKED).output.model_dump()

    def tools(self) -> Any:
        return self.agent(tools=[add]).run_sync(ASKED).output

    def streamed_tools(self) -> Any:
        return asyncio.run(self.streamed(self.agent(tools=[add])))


class PydanticAIResponses(PydanticAI):
    model = "OpenAIResponsesModel"


class LiteLLM:
    package = "litellm"

    def __init__(self, url: str) -> None:
        self.library: Any = import_module("litellm")
        self.asked = {"model": "openai/tiny", "api_base": url, "api_key": "none", "num_retries": 0}

    def chat(self, messages: Any = MESSAGES, **more: Any) -> Any:
        answer = self.library.completion(**self.asked, messages=messages, **more)
        return (self.library.stream_chunk_builder([*answer]) if more.get("stream") else answer).choices[0].message

    def text(self) -> Any:
        return self.chat().content

    def stream(self) -> Any:
        return self.chat(stream=True).content

    def structured(self) -> Any:
        return json.loads(self.chat(response_format=Thing).content)

    def tools(self, **more: Any) -> Any:
        message = self.chat(tools=TOOLS, **more)
        turns = [*MESSAGES, message.model_dump(), *map(result, message.tool_calls)]
        return self.chat(turns, tools=TOOLS, **more).content

    def streamed_tools(self) -> Any:
        return self.tools(stream=True)


class Instructor:
    package = "instructor"

    def __init__(self, url: str) -> None:
        self.library: Any = import_module("instructor")
        self.client = import_module("openai").OpenAI(base_url=url, api_key="none", max_retries=0)

    def structured(self) -> Any:
        modes = self.library.Mode.TOOLS, self.library.Mode.JSON_SCHEMA
        asked = {"model": "tiny", "messages": MESSAGES, "response_model": Thing, "max_retries": 0}
        first, _ = (self.library.from_openai(self.client, mode=each).chat.completions.create(**asked) for each in modes)
        return first.model_dump()


class LlamaIndex:
    package = "llama-index-llms-openai-like"

    def __init__(self, url: str) -> None:
        library: Any = import_module("llama_index.llms.openai_like")
        how = {"is_chat_model": True, "is_function_calling_model": True, "max_retries": 0}
        self.model = library.OpenAILike(api_base=url, api_key="none", model="tiny", **how)
        kinds: Any = import_module("llama_index.core.llms")
        self.message, self.asked = kinds.ChatMessage, [kinds.ChatMessage(**each) for each in MESSAGES]
        self.tool = import_module("llama_index.core.tools").FunctionTool.from_defaults(fn=add)

    def text(self) -> Any:
        return self.model.chat(self.asked).message.content

    def stream(self) -> Any:
        return "".join(chunk.delta or "" for chunk in self.model.stream_chat(self.asked))

    def structured(self) -> Any:
        return self.model.as_structured_llm(Thing).chat(self.asked).raw.model_dump()

    def loop(self, answer: Callable[..., Any]) -> Any:
        first = answer([self.tool], chat_history=self.asked)
        results = [
            self.message(
                role="tool", content=str(add(**call.tool_kwargs)), additional_kwargs={"tool_call_id": call.tool_id}
            )
            for call in self.model.get_tool_calls_from_response(first)
        ]
        return answer([self.tool], chat_history=[*self.asked, first.message, *results]).message.content

    def tools(self) -> Any:
        return self.loop(self.model.chat_with_tools)

    def streamed_tools(self) -> Any:
        return self.loop(lambda *tools, **asked: [*self.model.stream_chat_with_tools(*tools, **asked)][-1])


class LLM:
    package = "llm"

    def __init__(self, url: str) -> None:
        kinds: Any = import_module("llm.default_plugins.openai_models")
        self.model = kinds.Chat("tiny", model_name="tiny", api_base=url, supports_tools=True, supports_schema=True)
        self.model.key = "none"

    def text(self) -> Any:
        return self.model.prompt(ASKED, system=KIND, stream=False).text()

    def stream(self) -> Any:
        return "".join(self.model.prompt(ASKED, system=KIND))

    def structured(self) -> Any:
        return json.loads(self.model.prompt(ASKED, schema=Thing, stream=False).text())

    def tools(self) -> Any:
        return self.model.chain(ASKED, system=KIND, tools=[add], stream=False).text()

    def streamed_tools(self) -> Any:
        return "".join(self.model.chain(ASKED, system=KIND, tools=[add]))


class SmolAgents:
    """smolagents; it shows results of tools as texts of the user."""

    package = "smolagents"

    def __init__(self, url: str) -> None:
        self.library: Any = import_module("smolagents")
        self.model = self.library.OpenAIServerModel(model_id="tiny", api_base=url, api_key="none")
        self.tool = self.library.tool(described)

    def text(self) -> Any:
        return self.model.generate(MESSAGES).content

    def streamed(self, messages: Any, **more: Any) -> Any:
        parts = [*self.model.generate_stream(messages, **more)]
        return import_module("smolagents.models").agglomerate_stream_deltas(parts)

    def stream(self) -> Any:
        return self.streamed(MESSAGES).content

    def structured(self) -> Any:
        form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": Thing.model_json_schema()}}
        return json.loads(self.model.generate(MESSAGES, response_format=form).content)

    def loop(self, answer: Callable[..., Any]) -> Any:
        asked = {"tools_to_call_from": [self.tool], "tool_choice": "auto"}
        first = answer(MESSAGES, **asked)
        [call] = first.tool_calls
        told = f"<tool_response>{add(**json.loads(call.function.arguments))}</tool_response>"
        result = {"role": self.library.MessageRole.TOOL_RESPONSE, "content": [{"type": "text", "text": told}]}
        return answer([*MESSAGES, first, result], **asked).content

    def tools(self) -> Any:
        return self.loop(self.model.generate)

    def streamed_tools(self) -> Any:
        return self.loop(self.streamed)


class AIPerf:
    """aiperf, which measures: what it received is in its records."""

    package = "aiperf"

    def __init__(self, url: str) -> None:
        import_module("aiperf")
        self.url = url.removesuffix("/v1")

    def received(self, *more: str) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            asked, command = Path(folder, "asked.jsonl"), Path(sys.executable).with_name("aiperf")
            asked.write_text(json.dumps({"text": ASKED}))
            how = ["--endpoint-type", "chat", "--request-count", "1", "--ui", "none", "--export-level", "raw"]
            where = ["--input-file", str(asked), "--custom-dataset-type", "single_turn", "--artifact-dir", folder]
            model = ["-m", "tiny", "--tokenizer", os.environ["TOKENIZER"], "--url", self.url]
            env = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
            subprocess.run([command, "profile", *model, *how, *where, *more], env=env, check=True, capture_output=True)
            return json.loads(Path(folder, "profile_export_raw.jsonl").read_text().splitlines()[0])["responses"]

    def text(self) -> Any:
        [answer] = self.received()
        return json.loads(answer["text"])["choices"][0]["message"]["content"]

    def stream(self) -> Any:
        data = [each["value"] for answer in self.received("--streaming") for each in answer["packets"]]
        deltas = [choice["delta"] for text in data if text != "[DONE]" for choice in json.loads(text)["choices"]]
        return "".join(delta.get("content") or "" for delta in deltas)


CLIENTS: dict[str, Any] = {
    "openai": OpenAI,
    "openai, Responses": OpenAIResponses,
    "openai-agents": AgentsResponses,
    "openai-agents, chat": Agents,
    "langchain-openai": LangChain,
    "langchain-openai, Responses": LangChainResponses,
    "pydantic-ai": PydanticAI,
    "pydantic-ai, Responses": PydanticAIResponses,
    "litellm": LiteLLM,
    "instructor": Instructor,
    "llama-index": LlamaIndex,
    "llm": LLM,
    "smolagents": SmolAgents,
    "aiperf": AIPerf,
}
FEATURES = ("text", "stream", "structured", "tools", "streamed_tools")


def main(url: str, name: str) -> int:
    try:
        client = CLIENTS[name](url)
    except ImportError:
        return MISSING
    got = {feature: getattr(client, feature)() for feature in FEATURES if hasattr(client, feature)}
    print(json.dumps({"version": version(client.package), **got}))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
