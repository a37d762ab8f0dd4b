"""urls: which addresses are this machine's and asked without a proxy, and texts without the passwords in their URLs. Standard library only.

Many companies set HTTP_PROXY for every process and no NO_PROXY: then each client asks the proxy for 127.0.0.1, too.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

LOOPBACK = ("127.0.0.1", "localhost", "::1")
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
HIDDEN = "..."
USER = re.compile(r"(?<=://)(?P<begin>[^\s/?#:@]*:)(?P<secret>[^\s/?#]+)(?=@)")
"""What stands between the user and the host."""
OPTION = re.compile(
    r"(?P<begin>[?&;][A-Za-z0-9_.-]*(?:password|passwd|pwd|secret|token|access_key)=)(?P<secret>[^\s&;#]+)",
    re.IGNORECASE,
)
"""An option whose name says that it is secret."""


def is_loopback(address: str) -> bool:
    """Whether the host of `host:port` or of a URL is the loopback interface of this machine."""
    try:
        host = urlsplit(address if "://" in address else f"//{address}").hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # no address, or a name
        return False


def direct_hosts(environment: Mapping[str, str], *hosts: str) -> dict[str, str]:
    """Returns the variables by which programs ask this machine, and `hosts`, without a proxy; none where there is no proxy.

    What the environment excludes already stays so. `*` excludes everything, and is kept alone: in a list most clients take it for a name.
    """
    if not any(environment.get(name) or environment.get(name.upper()) for name in PROXIES):
        return {}
    given = f"{environment.get('no_proxy', '')},{environment.get('NO_PROXY', '')}".split(",")
    names = dict.fromkeys(name.strip() for name in (*given, *LOOPBACK, *hosts) if name.strip())
    if "*" in names:
        names = {"*": None}
    return dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(names))


def ask_directly(*addresses: str) -> None:
    """Has this process and those that it starts ask this machine, and the hosts of these URLs, without a proxy.

    For libraries that read the environment themselves: the clients of Ray and MLflow.
    """
    hosts = [host for address in addresses if (host := urlsplit(address).hostname)]
    os.environ.update(direct_hosts(os.environ, *hosts))


def direct_mounts(urls: Iterable[str]) -> dict[str, None]:
    """Returns the `mounts` of an httpx client that asks those of `urls` that are on this machine without a proxy."""
    hosts = {urlsplit(url).hostname or "" for url in urls if is_loopback(url)}
    return {f"all://[{host}]" if ":" in host else f"all://{host}": None for host in sorted(hosts)}


def without_secrets(text: str) -> str:
    """Returns a text with `...` for every password in its URLs."""
    if "://" not in text:
        return text
    for pattern in (USER, OPTION):
        text = pattern.sub(lambda match: match["begin"] + HIDDEN, text)
    return text
