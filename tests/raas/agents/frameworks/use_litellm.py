"""Calls of litellm: chats, streams, Anthropic's API, texts, retries."""

# ruff: noqa: T201

import asyncio
import json
import os
import sys

import litellm

litellm.suppress_debug_info = True
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_current_weather",
            "description": "Get the current weather in a given location",
            "parameters": {
                "type": "object",
                "properties": {"location": {"type": "string"}},
                "required": ["location"],
            },
        },
    }
]


def user(text):
    return {"role": "user", "content": text}


def several_turns():
    messages = [user("Hello, how are you?")]
    for text in ("And now?", "Good bye."):
        response = litellm.completion(model="openai/policy", messages=messages)
        messages += [response.choices[0].message, user(text)]
    response = litellm.completion(model="openai/policy", messages=messages)
    print(response.choices[0].message.content)


def _tools(model):
    messages = [user("What's the weather like in San Francisco and Tokyo?")]
    response = litellm.completion(model=model, messages=messages, tools=TOOLS)
    message = response.choices[0].message
    messages.append(message)
    for call in message.tool_calls:
        where = json.loads(call.function.arguments)["location"]
        result = {"name": call.function.name, "content": f"It is 10 degrees in {where}."}
        messages.append({"tool_call_id": call.id, "role": "tool", **result})
    response = litellm.completion(model=model, messages=messages, tools=TOOLS)
    print(len(message.tool_calls), response.choices[0].message.content)


def parallel_tools():
    _tools("openai/policy")


def anthropic_tools():
    _tools("anthropic/policy")


def streamed():
    for model in ("openai/policy", "anthropic/policy"):
        for chunk in litellm.completion(model=model, messages=[user("Hello")], stream=True):
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        print()


def structured_output():
    shape = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    response = litellm.completion(
        model="openai/policy",
        messages=[user("Who is it?")],
        response_format={"type": "json_schema", "json_schema": {"name": "who", "schema": shape}},
    )
    print(json.loads(response.choices[0].message.content))


def text():
    response = litellm.text_completion(model="text-completion-openai/policy", prompt="Say so:")
    print(response.choices[0].text)


def retried():
    async def ask(number):
        asked = [user(f"Hello, number {number}")]
        return await litellm.acompletion(model="openai/policy", messages=asked, num_retries=9)

    async def ask_all():
        return await asyncio.gather(*map(ask, range(6)))

    print({response.choices[0].message.content for response in asyncio.run(ask_all())})


# What litellm wants for its provider of texts; the session is the same.
os.environ.setdefault("OPENAI_API_BASE", os.environ["OPENAI_BASE_URL"])
globals()[sys.argv[1]]()
