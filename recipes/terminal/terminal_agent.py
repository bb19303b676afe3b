"""A terminal agent: it knows OpenAI's API and a shell, and nothing of astraflow.

It shows a model the task, runs the last block of its answer (with --plain, all of it), tells it
what came of that, and ends when an answer has no command, at the end of --turns, or of the context.
"""

import argparse
import http.client
import json
import os
import re
import shlex
import subprocess
from urllib.parse import urlsplit

SYSTEM = """You work in a Linux shell. Each of your answers ends with one block

```bash
command
```

whose output you are shown next. When the task is done, answer without a block."""
BLOCK = re.compile(r"^```[a-z]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
SHOWN_CHARS = 8000


def ask(messages: list[dict[str, str]]) -> str | None:
    """Return what the model says; None when its context is full.

    Raises:
        RuntimeError: It does not answer.
    """
    base = urlsplit(os.environ["OPENAI_BASE_URL"])
    line = http.client.HTTPConnection(base.netloc)
    headers = {
        "Content-Type": "application/json",
        "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
    }
    body = json.dumps({"model": "gpt-4o", "messages": messages})
    line.request("POST", f"{base.path}/chat/completions", body, headers)
    answer = line.getresponse()
    said = answer.read().decode()
    if answer.status == http.client.BAD_REQUEST and "context" in said:
        return None
    if answer.status != http.client.OK:
        raise RuntimeError(f"the model answered {answer.status}: {said}")
    return json.loads(said)["choices"][0]["message"]["content"] or ""


def command_of(said: str, *, is_plain: bool) -> str:
    if is_plain:
        return said.strip()
    blocks = BLOCK.findall(said)
    return blocks[-1].strip() if blocks else ""


def run(command: str) -> str:
    """Run a command in the shell that TASK_SHELL names, and return what it says."""
    shell = shlex.split(os.environ.get("TASK_SHELL", "bash"))
    try:
        done = subprocess.run(  # noqa: S603 - that is what it is for
            [*shell, "-c", command], capture_output=True, text=True, errors="replace", check=False
        )
    except (OSError, ValueError) as error:  # It is too long, or has a null byte.
        return f"[this cannot be run: {error}]"
    output = done.stdout + done.stderr
    if len(output) > SHOWN_CHARS:
        half = SHOWN_CHARS // 2
        output = f"{output[:half]}\n…\n{output[-half:]}"
    return f"{output}[exit code {done.returncode}]"


def main() -> None:
    parser = argparse.ArgumentParser(description="Let a model do a task in a shell.")
    parser.add_argument("task")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--plain", action="store_true")
    given = parser.parse_args()
    messages = [] if given.plain else [{"role": "system", "content": SYSTEM}]
    messages.append({"role": "user", "content": given.task})
    for turn in range(1, given.turns + 1):
        said = ask(messages)
        command = command_of(said, is_plain=given.plain) if said else ""
        if not command:
            return
        result = run(command)
        if turn < given.turns:
            messages.append({"role": "assistant", "content": said or ""})
            messages.append({"role": "user", "content": result})


if __name__ == "__main__":
    main()
