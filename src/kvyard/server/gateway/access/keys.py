"""Keys: the gateway's clients, their models and their rates, in a TOML or JSON file:

[[keys]]
name = "search-team"
key = "sk-..."                    # or sha256 = "...", of the key, so that the file gives nothing away
models = ["llama", "tools-*"]     # left out: all
explain = true                    # may ask /explain, and learns how each request was routed
cache_salt = "..."                # its prompts share no cached prefix with those of other salts
requests_per_minute = 600
tokens_per_minute = 200_000

[models.llama]                    # for all keys together
tokens_per_minute = 2_000_000
"""

import hashlib
import string
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from kvyard.errors import KvyardError
from kvyard.server.gateway.access.rates import Allowance, Now, Rate, RateTicket
from kvyard.server.http import Refusal
from kvyard.server.indexer.config import load, settings_as


class AccessKey(Rate, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Key of a client."""

    name: Annotated[str, Meta(min_length=1, max_length=200)]
    """For logs and metrics: it isn't secret."""
    key: str | None = None
    sha256: str | None = None
    models: tuple[str, ...] = ()
    """Names of models and adapters, ``*`` for any letters; empty: all."""
    explain: bool = False
    """True if it may ask /explain and gets the decision in each answer: both show what others have cached."""
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1000)] | None = None
    """Salt of the names of its prompts' blocks, a secret: who knows it can find out what is cached by it."""

    def salted(self, given: str | None) -> str | None:
        """Return the cache_salt that engines get for a request that has ``given`` itself."""
        if self.cache_salt is None or not given:
            return self.cache_salt or given
        return f"{len(self.cache_salt)}:{self.cache_salt}:{given}"  # no two pairs make the same

    def allows(self, model: str) -> bool:
        """Return true if it may ask for that model."""
        return not self.models or any(fnmatchcase(model, pattern) for pattern in self.models)

    @property
    def digest(self) -> str:
        """By which it is found. Raises ``KvyardError`` if it is invalid, missing or given twice."""
        if (self.key is None) == (self.sha256 is None):
            raise KvyardError(f"key {self.name}: give either key or sha256")
        if self.key is not None:
            if not self.key or not self.key.isascii() or not self.key.isprintable() or " " in self.key:
                raise KvyardError(f"key {self.name}: a key is one word of printable characters")
            return hashlib.sha256(self.key.encode()).hexdigest()
        written = (self.sha256 or "").lower()
        if len(written) != 64 or not set(written) <= set(string.hexdigits):
            raise KvyardError(f"key {self.name}: sha256 is 64 hexadecimal digits, as sha256sum writes them")
        return written


class KeyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of a key file."""

    keys: Annotated[list[AccessKey], Meta(min_length=1)]
    models: dict[str, Rate] = {}
    """Rate of all keys together for a model or an adapter."""


def read_keys(path: str) -> KeyFile:
    """Raises ``KvyardError`` for a file that can't be used, and says where."""
    key_file = settings_as(load(Path(path)), KeyFile, path)
    names: set[str] = set()
    digests: set[str] = set()
    for key in key_file.keys:
        try:
            digest = key.digest
        except KvyardError as error:
            raise KvyardError(f"{path}: {error}") from None
        if key.name in names:
            raise KvyardError(f"{path}: two keys are called {key.name}: give each a name of its own")
        if digest in digests:
            raise KvyardError(f"{path}: key {key.name} is used by two clients: give each its own")
        names.add(key.name)
        digests.add(digest)
    return key_file


def not_for_key(model: str) -> Refusal:
    """Return one refusal for a model that doesn't exist and for one that isn't for the key."""
    return Refusal(
        404, f"the model {model!r:.200} isn't there, or isn't for this key", field="model", fix="see /v1/models"
    )


class KeyRing:
    """All keys and what is left of their rates."""

    def __init__(self, file: KeyFile, now: Now) -> None:
        self._now = now
        self.file = file
        """In force."""
        self._token: AccessKey | None = None
        self._keys: dict[str, AccessKey] = {}
        self._by_key: dict[str, Allowance] = {}
        self._by_model: dict[str, Allowance] = {}
        self.refused: dict[str, int] = {}
        """By the name of a key, requests that were too many."""
        self.replace(file)

    def replace(self, file: KeyFile) -> None:
        """Go by another file from now on. What was used of a rate that is the same still counts."""
        self.file = file
        self._keys = {key.digest: key for key in file.keys}
        if self._token is not None:
            self._keys[self._token.digest] = self._token
        rates = {
            key.name: Rate(requests_per_minute=key.requests_per_minute, tokens_per_minute=key.tokens_per_minute)
            for key in file.keys
        }
        self._by_key = {name: self._kept(self._by_key, name, f"key {name}", rate) for name, rate in rates.items()}
        self._by_model = {
            name: self._kept(self._by_model, name, f"model {name}", rate) for name, rate in file.models.items()
        }

    def also(self, token: str) -> None:
        """Let in those who show ``token`` too, for everything."""
        self._token = AccessKey(name="token", key=token, explain=True)
        self._keys[self._token.digest] = self._token

    def find(self, authorization: str) -> AccessKey:
        """Return the key of this header. Raises ``Refusal`` for an unknown one."""
        scheme, _, given = authorization.partition(" ")
        # By its digest: how long a lookup takes says nothing of how near a guess was.
        digest = hashlib.sha256(given.strip().encode("utf-8", "surrogatepass")).hexdigest()
        key = self._keys.get(digest) if scheme.lower() == "bearer" else None
        if key is None:
            raise Refusal(
                401, "the key is missing or wrong", fix="send Authorization: Bearer KEY", WWW_Authenticate="Bearer"
            )
        return key

    def check(self, authorization: str) -> None:
        """Raise ``Refusal`` where nobody has this key."""
        self.find(authorization)

    def explains_to(self, authorization: str) -> AccessKey:
        """Return the key of a header that may ask why. Raises ``Refusal``."""
        key = self.find(authorization)
        if not key.explain:
            raise Refusal(403, "this key may not see routing decisions", fix="explain = true in its keys file")
        return key

    def admit(self, key: AccessKey, model: str, tokens: int) -> RateTicket:
        """Admit a request with ``tokens`` known tokens. Raises ``Refusal`` if its key may not ask for that model, or a rate
        is used up.
        """
        allowances = self.allowances(key, model)
        try:
            return RateTicket(allowances, tokens)
        except Refusal:
            self.count_refused(key)
            raise

    def allowances(self, key: AccessKey, model: str) -> list[Allowance]:
        """Return the allowances that a request draws on. Raises ``Refusal`` if its key may not ask for that model."""
        if not key.allows(model):
            raise not_for_key(model)
        allowances = [self._by_key[key.name]] if key.name in self._by_key else []
        if model in self._by_model:
            allowances.append(self._by_model[model])
        return allowances

    def count_refused(self, key: AccessKey) -> None:
        """Count a refused request of that key."""
        self.refused[key.name] = self.refused.get(key.name, 0) + 1

    def _kept(self, known: dict[str, Allowance], name: str, whose: str, rate: Rate) -> Allowance:
        old = known.get(name)
        return old if old is not None and old.rate == rate else Allowance(whose, rate, self._now)
