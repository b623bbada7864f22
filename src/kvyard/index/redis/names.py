"""Names of keys on a server, made from names of models, tenants and namespaces, which may contain any characters."""

from urllib.parse import quote

SAFE = "/ !\"#$&'()*+,;<=>?@[\\]^`{|}~"
"""All that is printed but for the colon, which stands between parts, and the percent sign, which escapes."""
TAKEN = frozenset({"share1", "void", "who", "until", "log"})
"""Parts that keys have for their own ends."""


def joined(*parts: str) -> str:
    """Return ``parts`` with colons between them. No two lists of parts make the same name, nor one that a key has beside it."""
    return ":".join(_part(part) for part in parts)


def _part(part: str) -> str:
    if part in TAKEN:
        return f"%{ord(part[0]):02X}{part[1:]}"
    return part if part.isalnum() else quote(part, safe=SAFE, errors="surrogatepass")
