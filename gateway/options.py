"""Options as fields of a pydantic model: their names in three places, their help texts, their parser."""

import argparse
import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo


class SettingsError(ValueError):
    """A setting is wrong; the message names the option, where it came from and the remedy."""


def declare(default: Any, description: str, unit: str = "", shown: str = "", **bounds: Any) -> Any:
    """Declare a field that is an option; ``shown`` replaces the default's own text on the help page."""
    return Field(default, description=description, json_schema_extra={"unit": unit, "shown": shown}, **bounds)


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """How one field of ``Settings`` is spelt, and what the help page says of it.

    Attributes:
        field: Name in ``Settings``.
        key: Name in the TOML file.
        flag: Name on the command line.
        env: Name in the environment.
        unit: Unit of the value; empty for none.
        default: The default as text.
        allowed: Allowed values as text; empty where the type says it all.
        description: What the option does.
        repeatable: Whether it takes several values.
        is_switch: Whether the flag alone means true.
    """

    field: str
    key: str
    flag: str
    env: str
    unit: str
    default: str
    allowed: str
    description: str
    repeatable: bool
    is_switch: bool


def options_of(model: type[BaseModel], env_prefix: str, keys: Mapping[str, str]) -> tuple[Option, ...]:
    """Return the options that ``model``'s fields are, in order.

    Args:
        model: A model whose fields were all made by ``declare``.
        env_prefix: What environment names start with.
        keys: Option names of the fields that are not named as their option.
    """
    schemas = model.model_json_schema()["properties"]
    return tuple(
        _option_of(name, key, env_prefix + key.upper(), info, schemas[name])
        for name, info in model.model_fields.items()
        for key in [keys.get(name, name)]
    )


def parser_of(options: Iterable[Option], prog: str, description: str) -> "LineParser":
    """Return a command line of ``options``; values stay text, and what is not given is absent."""
    parser = LineParser(
        prog=prog,
        argument_default=argparse.SUPPRESS,
        description=description,
        epilog="Repeatable options are lists in the file, and separated by spaces or ';' in the environment.",
    )
    for option in options:
        facts = [option.unit, option.allowed, "repeatable" * option.repeatable]
        facts += [f"default: {option.default}", f"environment: {option.env}"]
        keywords: dict[str, Any] = {"dest": option.field, "metavar": option.key.rpartition("_")[2].upper()}
        if option.repeatable:
            keywords["action"] = "append"
        elif option.is_switch:
            keywords |= {"nargs": "?", "const": "true", "metavar": "true|false"}
        text = f"{option.description} ({'; '.join(filter(None, facts))})".replace("%", "%%")
        parser.add_argument(option.flag, help=text, **keywords)
    return parser


def expected(option: Option) -> str:
    """Say what ``option`` takes, for the end of a refusal."""
    facts = [option.allowed or ("true|false" if option.is_switch else option.description)]
    return "expected: " + " ".join(filter(None, [*facts, option.unit and f"({option.unit})"]))


def nearest(name: str, known: Iterable[str], command: str = "forebay serve") -> str:
    """Point from an unknown name to the nearest known one, else to the help page; for the end of a refusal."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; see {command} --help"


def _option_of(field: str, key: str, env: str, info: FieldInfo, schema: dict[str, Any]) -> Option:
    if isinstance(info.default, tuple):
        default = " ".join(info.default) or "none"
    elif info.default is None:
        default = "none"
    else:
        default = str(info.default).lower() if isinstance(info.default, bool) else f"{info.default}".removesuffix(".0")
    merged = {word: value for part in [*schema.get("anyOf", ()), schema] for word, value in part.items()}
    words = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most"}
    bounds = ", ".join(f"{word} {merged[bound]:g}" for bound, word in words.items() if bound in merged)
    return Option(
        field=field,
        key=key,
        flag="--" + key.replace("_", "-"),
        env=env,
        unit=schema["unit"],
        default=schema["shown"] or default,
        allowed=bounds or "|".join(merged.get("enum", ())),
        description=schema["description"],
        repeatable=isinstance(info.default, tuple),
        is_switch=info.annotation is bool,
    )


class LineParser(argparse.ArgumentParser):
    """A command line whose refusals are one line; takes what ``ArgumentParser`` takes, by name."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(allow_abbrev=False, **keywords)

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse all of ``argv``; ``--help`` and ``--version`` print and raise ``SystemExit``.

        Raises:
            SettingsError: An option is unknown or has no value, or one has a value of the wrong type.
        """
        known, unknown = self.parse_known_args(list(argv))
        if unknown:
            name = unknown[0].partition("=")[0]
            if not name.startswith("-"):
                raise SettingsError(f"{unknown[0]}: unexpected argument; see {self.prog} --help")
            flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
            raise SettingsError(f"{name}: unknown option{nearest(name, flags, self.prog)}")
        return known

    def error(self, message: str) -> NoReturn:
        """Refuse in one line (argparse hook)."""
        raise SettingsError(f"{message.removeprefix('argument ')}; see {self.prog} --help")


def reason_of(exc: Exception) -> str:
    """Why something could not be read, in a few words."""
    return exc.strerror or "error" if isinstance(exc, OSError) else str(exc)
