"""Settings: fields of configuration structs that state their purpose and how people write them.

A struct marks the field, ``speedup: Annotated[float, Setting("Divides think times.", flag=True)] = 1.0``, and everything else
follows from that mark: the name in files, in Python and after ``--set``, the command-line flag, its help, and the refusals.
Text (20k blocks, 200GiB, 50ms, 32/24 GB/s) and plain values end up equal.
"""

import re
import tomllib
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from fractions import Fraction
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, Union, get_args, get_origin, get_type_hints

import msgspec

from kvyard.clock import MS, SECOND, US
from kvyard.decode_errors import DECODE_ERRORS
from kvyard.errors import KvyardError, suggest
from kvyard.registry import Registry
from kvyard.units import parse_bytes

Parser = Callable[[str, object], Any]
"""From a setting's name, for error texts, and the written value to the parsed value. Raises ``KvyardError``."""

COUNTS = {"": 1, "k": 1_000, "m": 1_000_000, "g": 1_000_000_000}
TIMES = {"ns": 1, "us": US, "µs": US, "ms": MS, "s": SECOND, "m": 60 * SECOND, "min": 60 * SECOND, "h": 3600 * SECOND}
FLAGS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
NO_LIMIT = "unlimited"
FEW = 12
"""Most names that are listed if one is unknown."""
_NUMBER = r"\s*(\d[\d_]*(?:\.\d+)?)\s*"


class Setting(NamedTuple):
    """Metadata of a field that is a setting, attached by ``Annotated``."""

    help: str
    """One line. ``{choices}`` in it stands for the names to choose from."""
    name: str = ""
    """Name for people, if it differs from the field's name."""
    also: tuple[str, ...] = ()
    """Further names; those with a dash, such as ``-tp``, are names of its flag alone."""
    flag: bool = False
    """True if it has a command-line flag of its own. The others are set with ``--set NAME=VALUE``."""
    parse: Parser | None = None
    """Parser, if the field's type doesn't determine one."""
    choices: Callable[[], Iterable[str] | str] | None = None
    """The names to choose from, or a phrase with them, where a registry has them. Those of a ``Literal`` are known. It must be
    a named function: annotations are evaluated where a lambda wouldn't see the module's names."""
    options: Registry[Any] | Callable[[], Registry[Any]] | None = None
    """Registry whose entries declare the numbers that can be set here, if the setting holds options of an entry."""
    heading: str = ""
    """Heading in a command's help, if it differs from the struct's ``heading``."""


class Declared(NamedTuple):
    """A setting as a struct declares it."""

    name: str
    field: str
    parse: Parser
    help: str
    default: object
    mark: Setting
    heading: str = ""
    """Heading in a command's help."""
    is_table: bool = False
    """True if it is a table of settings, which are also set one by one: ``NAME.FIELD=VALUE``."""

    @property
    def full_help(self) -> str:
        """The help, with choices and default where these are plain. Looks up the names that a registry has."""
        text = self.help
        if self.mark.choices is not None:
            text = text.replace("{choices}", _either(self.mark.choices()))
        plain = isinstance(self.default, int | float | str) and not isinstance(self.default, bool)
        if not plain or self.default == "" or "default" in text:
            return text
        return f"{text} [default: {self.default}]"

    def options(self) -> list[str]:
        """Return a line for each number that can be set here, of each entry of its registry."""
        registry = self.mark.options() if callable(self.mark.options) else self.mark.options
        if registry is None:
            return []
        return [
            f"{entry}: {name}={option.default:g}  {option.help}".rstrip()
            for entry in registry.names()
            for name, option in registry.options(entry).items()
        ]


class Settings(dict[str, Declared]):
    """Settings that can be given together, by the names that people use."""

    def __init__(
        self,
        *parts: Mapping[str, Declared],
        left_out: Mapping[str, str] | None = None,
        own: str = "",
        tables: "Mapping[str, Settings] | None" = None,
        passed_over: Iterable[str] = (),
    ) -> None:
        """``left_out`` has names that are refused for a reason, and the reason.

        A file may have some of them in tables, so that it can be read by several commands: in the table ``own`` by these
        names, and in each of ``tables`` by the names of fields. Tables of others are ``passed_over``.
        """
        super().__init__({name: declared for part in parts for name, declared in part.items()})
        self.left_out = left_out or {}
        self.tables = dict(tables or {})
        self._own = own
        self._passed_over = tuple(passed_over)
        self._also = {
            also: name for name, declared in self.items() for also in declared.mark.also if not also.startswith("-")
        }

    def joined(self, more: "Settings", tables: "Mapping[str, Settings]") -> "Settings":
        """Return these settings and ``more``, which a file may have in further ``tables``."""
        both = {**self.tables, **tables}
        return Settings(self, more, left_out=self.left_out, own=self._own, tables=both, passed_over=self._passed_over)

    def named(self, given: Mapping[str, Any], where: str = "") -> dict[str, Any]:
        """Return ``given`` with aliases replaced by first names. Raises ``KvyardError`` for a setting given under two names."""
        values: dict[str, Any] = {}
        for name, value in given.items():
            first = self._also.get(name, name)
            if first in values or (first != name and first in given):
                raise KvyardError(f"{name}{where} is another name of {first}: leave one of the two out")
            values[first] = value
        return values

    def check_names(self, names: Iterable[str], where: str = "") -> None:
        """Raise ``KvyardError`` at the first of ``names`` that can't be set, with the reason or the nearest name."""
        for name in names:
            if name in self.left_out:
                raise KvyardError(f"{name}: {self.left_out[name]}")
            table, dot, _ = name.partition(".")
            if dot and table in self and self[table].is_table:
                continue  # its fields are checked when it is parsed
            if name not in self and name not in self._also:
                listed = "" if len(self) <= FEW else "--list-settings lists them"
                hint = suggest(name.replace("-", "_"), [*self, *self._also], listed)
                raise KvyardError(f"unknown setting {name!r}{where}: {hint}")

    def parse(self, given: Mapping[str, object], where: str = "") -> dict[str, Any]:
        """Return ``given`` with text parsed, without ``None`` values. Raises ``KvyardError``, naming ``where``."""
        given = self._folded({}, given)
        self.check_names(given, where)
        values = self.named(given, where).items()
        return {name: self[name].parse(f"{name}{where}", value) for name, value in values if value is not None}

    def merge(self, base: Mapping[str, object] | str | Path | None, on_top: Mapping[str, object]) -> dict[str, object]:
        """Return the settings of a file or mapping, overridden by ``on_top``. Raises ``KvyardError`` where a number
        replaces tables."""
        settings = self.named(base if isinstance(base, Mapping) else self.read(base) if base else {})
        on_top = self._folded(settings, on_top)
        given = {name: value for name, value in self.named(on_top).items() if value is not None}
        for name in given:
            if isinstance(settings.get(name), list | tuple):
                raise KvyardError(
                    f"{name} is given twice: the configuration has tables of {name}, so leave the number out"
                )
        return {**settings, **given}

    def _folded(self, base: Mapping[str, object], given: Mapping[str, object]) -> Mapping[str, object]:
        """Return ``given`` with names such as ``sglang.page_size`` folded into tables, over those of ``base``."""
        if not any("." in name for name in given):
            return given
        folded = {name: value for name, value in given.items() if "." not in name}
        for name, value in given.items():
            table, dot, field = name.partition(".")
            if not dot:
                continue
            if table not in self or not self[table].is_table:
                folded[name] = value  # an unknown setting, refused later
                continue
            before = folded.get(table, base.get(table))
            folded[table] = {**(before if isinstance(before, Mapping) else {}), field.replace("-", "_"): value}
        return folded

    def read(self, path: str | Path) -> dict[str, Any]:
        """Read a TOML file of settings, values as written. Raises ``KvyardError``, naming the file."""
        try:
            with Path(path).open("rb") as file:
                values = tomllib.load(file)
        except OSError as error:
            raise KvyardError(f"can't read {path}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:  # also of a number with more digits than Python reads
            raise KvyardError(f"{path} is not TOML: {error}") from None
        try:
            values = self._flat(values)
            self.check_names(values)
        except KvyardError as error:
            raise KvyardError(f"{path}: {error}") from None
        return values

    def _flat(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Flatten the tables of a file. Raises ``KvyardError`` for a setting that is given twice."""
        flat: dict[str, Any] = {}
        parts: list[tuple[str, Mapping[str, Any]]] = [("", document)]
        fields: dict[str, dict[str, str]] = {self._own: {}}
        fields |= {
            table: {setting.field: name for name, setting in part.items()} for table, part in self.tables.items()
        }
        for table, named in fields.items():
            given = document.get(table)
            if table and isinstance(given, Mapping):
                for field in given:
                    if named and field not in named:
                        raise KvyardError(f"unknown setting {field!r} of [{table}]: {suggest(field, named)}")
                flat_names = {str(name): value for name, value in given.items()}
                parts.append((table, {named.get(name, name): value for name, value in flat_names.items()}))
        taken = {table for table, _ in parts}
        for table, given in parts:
            for name, value in given.items():
                if not table and isinstance(value, Mapping) and (name in taken or name in self._passed_over):
                    continue
                if name in flat:
                    raise KvyardError(f"{name} is given twice, once in [{table}]: leave one of the two out")
                flat[name] = value
        return flat


@cache
def settings_of(struct: type[msgspec.Struct], prefix: str = "", **words: str) -> Settings:
    """Return the settings that ``struct`` declares, by the names that people use; ``words`` fill gaps in their help texts."""
    declared: dict[str, Declared] = {}
    hints = get_type_hints(struct, include_extras=True)
    for field in msgspec.structs.fields(struct):
        hint = hints[field.name]
        mark = next((meta for meta in getattr(hint, "__metadata__", ()) if isinstance(meta, Setting)), None)
        if mark is None:
            continue
        name = prefix + (mark.name or field.name)
        plain = _plain_type(hint)
        text = mark.help
        for word, value in words.items():
            text = text.replace(f"{{{word}}}", value)
        if get_origin(plain) is Literal:
            text = text.replace("{choices}", _either(get_args(plain)))
        parse = mark.parse or _parser_for(plain, field.name)
        heading = mark.heading or getattr(struct, "heading", "")
        table = mark.parse is None and _is_struct(plain)
        declared[name] = Declared(name, field.name, parse, text, field.default, mark, heading, table)
    return Settings(declared)


def chosen(struct: type[msgspec.Struct], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parsed settings in ``given`` that ``struct`` declares, by its fields' names."""
    return {setting.field: given[name] for name, setting in settings_of(struct).items() if name in given}


def read_texts(kind: type[msgspec.Struct], given: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Return ``given`` with text parsed to the types of the fields of ``kind`` and of its tables; other values are kept.

    Every field counts, marked as a setting or not. Lists and tables may be written as JSON. Raises ``KvyardError``, saying
    ``where``, for a name that is no field and for text that can't be read.
    """
    hints = get_type_hints(kind, include_extras=True)
    fields = kind.__struct_fields__
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in fields:
            raise KvyardError(f"unknown setting {name!r:.200}{where}: {suggest(name, fields)}")
        hint = hints[name]
        mark = next((meta for meta in getattr(hint, "__metadata__", ()) if isinstance(meta, Setting)), None)
        if value == "null" and _takes_none(hint):
            values[name] = None
        elif isinstance(value, str) and mark is not None and mark.parse is not None:
            values[name] = mark.parse(f"{name}{where}", value)
        else:
            values[name] = _read_text(_plain_type(hint), name, value, where)
    return values


def _read_text(plain: Any, name: str, value: Any, where: str) -> Any:
    if isinstance(value, str):
        if plain in (int, float, bool) or get_origin(plain) is Literal:
            return _parser_for(plain, name)(f"{name}{where}", value)
        if plain == dict[str, float] and not value.startswith("{"):
            return figures(f"{name}{where}", value)
        if plain is str or value[:1] not in ("[", "{"):
            return value
        try:
            value = msgspec.json.decode(value)
        except DECODE_ERRORS:
            _refuse(f"{name}{where}", value, "JSON")
    if isinstance(value, Mapping) and isinstance(plain, type) and issubclass(plain, msgspec.Struct):
        return read_texts(plain, value, f" of {name}{where}")
    if isinstance(value, list) and get_origin(plain) is list:
        (item,) = get_args(plain)
        return [
            _read_text(_plain_type(item), name, entry, where) if not isinstance(entry, str) else entry
            for entry in value
        ]
    return value


SMALLEST, LARGEST = 1e-12, 1e18
"""Range of numbers that can be meant: beyond it, sums and quotients overflow."""


# -- how settings are read ----------------------------------------------------------------------------------------------


def count(name: str, value: object) -> int:
    """Return a whole number: 20000, ``"20k"``, ``"1.5m"``."""
    exact: int | Fraction | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        exact = value
    elif isinstance(value, float) and value.is_integer():
        exact = int(value)
    elif isinstance(value, str):
        matched = re.fullmatch(_NUMBER + r"([kmgKMG]?)", value)
        if matched is not None:
            exact = Fraction(matched[1].replace("_", "")) * COUNTS[matched[2].lower()]
        elif re.fullmatch(r"\s*-\d{1,30}\s*", value):
            exact = int(value)
    if exact is None or exact.denominator != 1:
        _refuse(name, value, "a whole number such as 500, 20k or 1.5m")
    if not -(1 << 63) < exact < 1 << 63:
        _refuse(name, value, "less than 9223372036854775808")
    return int(exact)


def number(name: str, value: object) -> float:
    """Return a number, whole or not."""
    parsed: float | None = None
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):
            parsed = float(value)
    if parsed is None:
        _refuse(name, value, "a number")
    if parsed and not SMALLEST <= abs(parsed) <= LARGEST and isfinite(parsed):
        _refuse(name, value, f"0, or from {SMALLEST:g} to {LARGEST:g}")
    return parsed


def figures(name: str, value: object) -> dict[str, float]:
    """Return numbers by name: a table, or text such as ``"alpha=0.5,window_s=60"``."""
    if isinstance(value, str):
        pairs = [pair.partition("=") for pair in value.split(",") if pair.strip()]
        value = {key.strip(): number(name, worth.strip()) for key, _, worth in pairs}
    if isinstance(value, Mapping):
        return {str(key): number(f"{name}, {key}", worth) for key, worth in value.items()}
    raise KvyardError(f"{name} is {value!r}: write NAME=VALUE,NAME=VALUE, or a table")


def flag(name: str, value: object) -> bool:
    """True or false, also as ``"on"``, ``"no"`` and the like."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in FLAGS:
        return FLAGS[value.strip().lower()]
    _refuse(name, value, "true or false")


def text(name: str, value: object) -> str:
    """Return text that isn't empty."""
    if isinstance(value, str) and value.strip():
        return value.strip()
    _refuse(name, value, "a name")


def size(name: str, value: object) -> int:
    """Return bytes: 1073741824, ``"200GiB"``."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        with suppress(KvyardError):
            return parse_bytes(value)
    _refuse(name, value, "a size in bytes such as 200GiB or 80GB")


def duration(name: str, value: object) -> int:
    """Return nanoseconds, from text with a unit: ``"50ms"``, ``"2.5s"``, ``"10min"``. 0 needs none."""
    if value in (0, "0") and not isinstance(value, bool):
        return 0
    matched = re.fullmatch(_NUMBER + r"([a-zµ]+)", value) if isinstance(value, str) else None
    if matched is not None and matched[2] in TIMES:
        return round(Fraction(matched[1].replace("_", "")) * TIMES[matched[2]])
    _refuse(name, value, "a length of time with its unit, such as 50ms, 2.5s or 10min")


def bandwidth(name: str, value: object) -> tuple[int | None, int | None]:
    """Return bytes per second out of the device and back into it, from GB/s: 32, ``"32"``, ``"32/24"``, ``"unlimited"``."""
    parts = value.split("/") if isinstance(value, str) else [value]
    if len(parts) <= 2:
        speeds = [_one_way(part) for part in parts]
        if all(speed != 0 for speed in speeds):
            return speeds[0], speeds[-1]
    _refuse(name, value, "GB/s above 0, for both ways or out/back, such as 32 or 32/24, or unlimited")


def as_it_is(name: str, value: object) -> object:
    """Return the value as written; its user checks it."""
    return value


def seconds(name: str, value: object) -> float:
    """Return seconds: 90, ``"1.5s"``, ``"2min"``."""
    return _time(name, value, SECOND)


def milliseconds(name: str, value: object) -> float:
    """Return milliseconds: 90, ``"1.5s"``."""
    return _time(name, value, MS)


def whole_milliseconds(name: str, value: object) -> int:
    """Return whole milliseconds: 90, ``"1.5s"``."""
    return count(name, _time(name, value, MS))


PARSERS: Mapping[object, Parser] = {int: count, float: number, bool: flag, str: text}
BY_UNIT: Mapping[tuple[object, str], Parser] = {
    (int, "bytes"): size,
    (float, "s"): seconds,
    (float, "seconds"): seconds,
    (float, "ms"): milliseconds,
    (int, "ms"): whole_milliseconds,
}
"""Parsers by type and last word of the field's name, for fields with a unit in their names."""


def _time(name: str, value: object, unit: int) -> float:
    if isinstance(value, str) and value.strip()[-1:].isalpha():
        return duration(name, value) / unit
    return number(name, value)


def _one_way(value: object) -> int | None:
    if value == NO_LIMIT:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf"):
        return round(Fraction(value) * 10**9)
    matched = re.fullmatch(_NUMBER + r"(?:GB/s)?", value) if isinstance(value, str) else None
    return round(Fraction(matched[1]) * 10**9) if matched is not None else 0


def _either(names: Iterable[str] | str) -> str:
    if isinstance(names, str):
        return names
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


def _plain_type(hint: Any) -> Any:
    """Return ``hint`` without marks and without ``None``."""
    while True:
        origin = get_origin(hint)
        if origin is Annotated:
            hint = get_args(hint)[0]
        elif origin in (Union, types.UnionType) and type(None) in get_args(hint) and len(get_args(hint)) == 2:
            hint = next(member for member in get_args(hint) if member is not type(None))
        else:
            return hint


def _takes_none(hint: Any) -> bool:
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    return type(None) in get_args(hint)


def _parser_for(plain: Any, field: str) -> Parser:
    if get_origin(plain) is Literal:
        return _one_of(get_args(plain))
    return BY_UNIT.get((plain, field.rpartition("_")[2])) or PARSERS.get(plain) or _table(plain)


def _one_of(choices: tuple[str, ...]) -> Parser:
    def parse_choice(name: str, value: object) -> str:
        choice = text(name, value)
        if choice not in choices:
            raise KvyardError(f"{name} is {choice!r}: {suggest(choice, choices)}")
        return choice

    return parse_choice


def _table(kind: Any) -> Parser:
    def table(name: str, value: object) -> Any:
        if _is_struct(kind):
            if isinstance(value, kind):
                return value
            if not isinstance(value, Mapping):
                _refuse(name, value, f"a table: write {name}.{kind.__struct_fields__[0]}=VALUE, or [{name}] in a file")
            value = read_texts(kind, value, f" of {name}")
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            raise KvyardError(_mismatch(name, str(error))) from None

    return table


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


_EXPECTED = re.compile(r"Expected `([^`]+)`, got `([^`]+)`(?: - at `\$\.?([^`]*)`)?")
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "array": "a list"}


def _mismatch(name: str, error: str) -> str:
    """Return msgspec's error about a table as a sentence."""
    match = _EXPECTED.match(error)
    if match is None:
        return f"{name} can't be read: {error}"
    wanted = " or ".join(
        _KINDS.get(kind.strip(), kind.strip()) for kind in match[1].split("|") if kind.strip() != "null"
    )
    where = f"{name}.{match[3]}" if match[3] else name
    return f"{where} must be {wanted}, and is {_KINDS.get(match[2], match[2])}"


def _refuse(name: str, value: object, wanted: str) -> NoReturn:
    raise KvyardError(f"{name} is {value!r}: it must be {wanted}")
