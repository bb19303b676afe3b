"""An agent of the standard library: asks for what its task says, and may report a reward."""

import json
import os
import sys
import urllib.request
from pathlib import Path

# Process ids are those of a namespace of its own.
PROCESS = int.from_bytes(os.urandom(4), "big")


def post(url, body, key=""):
    request = urllib.request.Request(
        url,
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read() or b"null")


def ask(base_url, key, text):
    asked = {"model": "any", "messages": [{"role": "user", "content": text}]}
    answer = post(f"{base_url}/chat/completions", asked, key)
    return answer["choices"][0]["message"]["content"]


def one_episode():
    task = json.loads(Path(os.environ["ASTRAFLOW_TASK_FILE"]).read_text())["task"]
    said = ask(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], task["prompt"])
    sys.stdout.write(f"I say {said}\n")
    if "--reward" in sys.argv:
        post(os.environ["ASTRAFLOW_SESSION_URL"] + "/reward", {"reward": len(said)})
    if "--crash" in sys.argv:
        sys.exit("no such tool")


def many_episodes():
    while True:
        url, token = os.environ["ASTRAFLOW_TAKE_URL"], os.environ["ASTRAFLOW_TAKE_TOKEN"]
        session = post(url, {}, token)
        if session is None:
            continue
        if session["task"]["prompt"] == "die":
            os._exit(1)
        if session["task"]["prompt"] == "stay":
            sys.stdin.read()
        said = ask(session["base_url"], session["api_key"], session["task"]["prompt"])
        post(
            session["session_url"] + "/reward", {"reward": len(said), "parts": {"process": PROCESS}}
        )
        post(session["session_url"] + "/end", {})


many_episodes() if "ASTRAFLOW_TAKE_URL" in os.environ else one_episode()
