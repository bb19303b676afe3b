"""A shell for agents: `TASK_SHELL -c COMMAND` runs in the sandbox of the episode, not here."""

import json
import os
import socket
import sys


def main() -> int:
    if len(sys.argv) < 3 or sys.argv[1] not in ("-c", "-lc"):
        sys.stderr.write("usage: sandbox_shell.py -c COMMAND\n")
        return 2
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(os.environ["TASK_SOCKET"])
        line.sendall(json.dumps({"command": sys.argv[2]}).encode() + b"\n")
        with line.makefile("rb") as answers:
            answer = json.loads(answers.readline())
    sys.stdout.write(answer["stdout"])
    sys.stderr.write(answer["stderr"])
    return int(answer["code"])


if __name__ == "__main__":
    sys.exit(main())
