"""A black-box agent: it knows OpenAI's API and nothing of astraflow, but for where to ask for work.

It sorts letters: shows the policy the row's prompt and leaves the reward to the scorer. One process
serves many episodes, one after the other.
"""

import http.client
import json
import os
from typing import Any
from urllib.parse import urlsplit


class Line:
    """One connection to the node that is kept open."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        is_secure = address.scheme == "https"
        connect = http.client.HTTPSConnection if is_secure else http.client.HTTPConnection
        self._connection = connect(address.netloc)

    def post(self, url: str, body: dict[str, Any], key: str) -> Any:
        """Send JSON, return JSON; None when there is nothing."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        path = url.partition("://")[2].partition("/")[2]
        self._connection.request("POST", f"/{path}", json.dumps(body), headers)
        answer = self._connection.getresponse()
        said = answer.read()
        return json.loads(said) if said and answer.status == http.client.OK else None


def serve(line: Line, take_url: str, token: str) -> None:
    """Serve one episode, if there is one."""
    session = line.post(take_url, {}, token)
    if session is None:
        return
    asked = {
        "model": "gpt-4o-mini",
        "messages": [{"role": "user", "content": session["task"]["prompt"]}],
    }
    answer = line.post(f"{session['base_url']}/chat/completions", asked, session["api_key"])
    failure = "" if answer is not None else "the policy did not answer"
    line.post(f"{session['session_url']}/end", {"failure": failure}, session["api_key"])


def main() -> None:
    """Serve episodes for ever; who started it stops it."""
    take_url, token = os.environ["ASTRAFLOW_TAKE_URL"], os.environ["ASTRAFLOW_TAKE_TOKEN"]
    line = Line(take_url)
    while True:
        serve(line, take_url, token)


if __name__ == "__main__":
    main()
