"""Graphs of LangGraph over langchain-openai."""

# ruff: noqa: T201

import sys
from typing import Annotated, TypedDict

from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode, tools_condition
from pydantic import BaseModel


@tool
def multiply(a: int, b: int) -> int:
    """Multiply a and b."""
    return a * b


class State(TypedDict):
    messages: Annotated[list, add_messages]


class Joke(BaseModel):
    """Joke to tell the user."""

    setup: str
    punchline: str


def graph_of(llm):
    bound = llm.bind_tools([multiply])
    builder = StateGraph(State)
    builder.add_node("chatbot", lambda state: {"messages": [bound.invoke(state["messages"])]})
    builder.add_node("tools", ToolNode([multiply]))
    builder.add_edge(START, "chatbot")
    builder.add_conditional_edges("chatbot", tools_condition)
    builder.add_edge("tools", "chatbot")
    return builder.compile()


def asked(text):
    return {"messages": [{"role": "user", "content": text}]}


def tools():
    state = graph_of(ChatOpenAI(model="policy")).invoke(asked("What is 6 times 7?"))
    print(state["messages"][-1].text)


def responses_api():
    llm = ChatOpenAI(model="policy", use_responses_api=True)
    print(graph_of(llm).invoke(asked("What is 6 times 7?"))["messages"][-1].text)


def streamed():
    graph = graph_of(ChatOpenAI(model="policy"))
    for chunk, _ in graph.stream(asked("What is 6 times 7?"), stream_mode="messages"):
        if isinstance(chunk, AIMessage):
            print(chunk.text, end="", flush=True)
    print()


def structured_output():
    llm = ChatOpenAI(model="policy").with_structured_output(Joke, method="json_schema")
    print(repr(llm.invoke("Tell me a joke about cats")))


def sub_agents():
    llm = ChatOpenAI(model="policy")
    worker = graph_of(llm)

    def ask(state):
        told = worker.invoke({"messages": [("system", "You compute."), *state["messages"]]})
        return {"messages": [told["messages"][-1]]}

    builder = StateGraph(State)
    builder.add_node("worker", ask)
    builder.add_node("writer", lambda state: {
        "messages": [llm.invoke([("system", "You write."), ("user", state["messages"][-1].text)])]
    })  # fmt: skip
    builder.add_edge(START, "worker")
    builder.add_edge("worker", "writer")
    builder.add_edge("writer", END)
    print(builder.compile().invoke(asked("What is 6 times 7?"))["messages"][-1].text)


globals()[sys.argv[1]]()
