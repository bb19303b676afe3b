"""An emulated long link between two network namespaces of this machine. Needs root.

>>> with Link(PROFILES["100mbit-100ms"], tuned=True) as link:  # doctest: +SKIP
...     server = link.near.popen([sys.executable, "server.py", link.near.address])
...     link.far.run([sys.executable, "client.py", link.near.address])
...     print(link.count())
"""

from link.counters import Counts, Flow
from link.end import End
from link.hosts import Host
from link.link import Link
from link.needs import LinkUnavailableError, require_link
from link.profiles import PROFILES, Profile

__all__ = [
    "PROFILES",
    "Counts",
    "End",
    "Flow",
    "Host",
    "Link",
    "LinkUnavailableError",
    "Profile",
    "require_link",
]
