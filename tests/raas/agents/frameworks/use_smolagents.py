"""Agents of smolagents."""

# ruff: noqa: T201

import sys

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool


@tool
def get_travel_duration(start: str, end: str) -> str:
    """Get the travel time between two places.

    Args:
        start: Where it begins.
        end: Where it ends.
    """
    return f"From {start} to {end} it takes 2 hours."


def any_tool():
    agent = ToolCallingAgent(tools=[get_travel_duration], model=OpenAIModel("policy"))
    print(agent.run("How long is it from Paris to London?"))


def one_tool():
    agent = ToolCallingAgent(tools=[], model=OpenAIModel("policy"))
    print(agent.run("How long is it from Paris to London?"))


def code():
    agent = CodeAgent(tools=[get_travel_duration], model=OpenAIModel("policy"))
    print(agent.run("How long is it from Paris to London?"))


def streamed():
    model = OpenAIModel("policy")
    agent = ToolCallingAgent(tools=[get_travel_duration], model=model, stream_outputs=True)
    print(agent.run("How long is it from Paris to London?"))


def managed_agents():
    model = OpenAIModel("policy")
    traveller = CodeAgent(
        tools=[get_travel_duration],
        model=model,
        name="traveller",
        description="Knows how long travels take.",
    )
    boss = CodeAgent(tools=[], model=model, managed_agents=[traveller])
    print(boss.run("Plan a journey to London."))


globals()[sys.argv[1]]()
