"""Agents of the OpenAI Agents SDK; its default is the Responses API."""

# ruff: noqa: T201

import asyncio
import sys

from openai import AsyncOpenAI
from pydantic import BaseModel

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool


@function_tool
def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return f"The weather in {city} is sunny."


class Event(BaseModel):
    """What is in the calendar."""

    name: str
    day: int


WEATHER = Agent(name="Weather", instructions="You tell the weather.", tools=[get_weather])


async def chat():
    agent = Agent(name="Assistant", instructions="You only respond in haikus.")
    result = await Runner.run(agent, "Tell me about recursion.")
    print(result.final_output)


async def tool():
    print((await Runner.run(WEATHER, "What's the weather in Tokyo?")).final_output)


async def parallel_tools():
    agent = WEATHER.clone(model_settings=ModelSettings(parallel_tool_calls=True))
    print((await Runner.run(agent, "And in Tokyo and Rome?")).final_output)


async def several_turns():
    agent = Agent(name="Assistant", instructions="Reply very concisely.")
    result = await Runner.run(agent, "What city is the Golden Gate Bridge in?")
    asked = [*result.to_input_list(), {"role": "user", "content": "What state is it in?"}]
    print(result.final_output, (await Runner.run(agent, asked)).final_output)


async def streamed():
    result = Runner.run_streamed(WEATHER, input="What's the weather in Tokyo?")
    async for event in result.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            print(event.data.delta, end="", flush=True)
    print()


async def structured_output():
    agent = Agent(name="Calendar", instructions="Extract the event.", output_type=Event)
    print(repr((await Runner.run(agent, "The party is on the 7th.")).final_output))


async def handoff():
    spanish = Agent(name="Spanish agent", instructions="You only speak Spanish.")
    triage = Agent(name="Triage agent", instructions="Hand off.", handoffs=[spanish])
    result = await Runner.run(triage, "Hola, ¿cómo estás?")
    print(result.last_agent.name, result.final_output)


async def agents_as_tools():
    spanish = Agent(name="Spanish agent", instructions="You translate to Spanish.")
    tool = spanish.as_tool(tool_name="to_spanish", tool_description="Translate to Spanish")
    boss = Agent(name="Boss", instructions="You call translators.", tools=[tool])
    print((await Runner.run(boss, "Say 'hello' in Spanish.")).final_output)


async def chat_completions():
    model = OpenAIChatCompletionsModel(model="policy", openai_client=AsyncOpenAI())
    agent = WEATHER.clone(model=model)
    print((await Runner.run(agent, "What's the weather in Tokyo?")).final_output)


asyncio.run(globals()[sys.argv[1]]())
