"""Removes secrets and the home folder from arguments, variables and text before they are written.

An argument or variable is secret if its name contains one of ``SECRET_WORDS`` as a whole word:
``--wandb-key`` and ``hubToken`` are secret, ``--monkey`` and ``--num-keys`` are not. Credentials
in URLs are secret too. The home folder becomes ``~``, because it contains the user's name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

REDACTED = "***"
SECRET_WORDS = frozenset(
    (
        "apikey", "auth", "credential", "credentials", "key", "passphrase", "passwd", "password",
        "secret", "token",
    )
)  # fmt: skip
QUANTITY_WORDS = frozenset(
    ("count", "dim", "heads", "len", "length", "max", "min", "n", "num", "number", "size")
)  # ``--key-dim 64`` and ``--max-token-length 512`` are sizes of a model
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]*)?")
_NAME = r"[A-Za-z][\w.-]*"
_ASSIGNMENT = re.compile(rf"([-+]*{_NAME})=(.*)", re.DOTALL)
_PAIR = re.compile(rf"({_NAME})([\"']?\s*[=:]\s*[\"']?)([^\s\"',;&{{}}]+)")
_URL_CREDENTIALS = re.compile(r"(://)[^/\s?#]*@")


def is_secret_name(name: str) -> bool:
    """Return whether ``name``, of an argument or a variable, names a secret.

    Words end at ``-``, ``_``, ``.`` and changes of case.
    """
    return not SECRET_WORDS.isdisjoint(_words(name))


def hide_secrets(arguments: Iterable[str]) -> tuple[str, ...]:
    """Return the arguments of a command with ``***`` in place of every secret."""
    found: list[str] = []
    option = ""
    for argument in arguments:
        if option and not argument.startswith("-"):
            found.append(_hide_value(option, argument))
        else:
            found.append(_hide_in_argument(argument))
        option = argument if re.fullmatch(rf"-+{_NAME}", argument) else ""
    return tuple(found)


def redact_arguments(arguments: Iterable[str]) -> tuple[str, ...]:
    """Return the arguments of a command without secrets, and with ``~`` for the home folder."""
    return tuple(abbreviate_home(argument) for argument in hide_secrets(arguments))


def redact_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables without secrets, and with ``~`` for the home folder."""
    return {name: abbreviate_home(_hide_value(name, value)) for name, value in variables.items()}


def redact_text(text: str) -> str:
    """Return a message that may quote arguments or URLs without secrets and home folder."""
    parts = re.split(r"(\s+)", text)
    parts[::2] = hide_secrets(parts[::2])
    return abbreviate_home("".join(parts))


def abbreviate_home(text: str) -> str:
    """Replace the home folder with ``~`` in every path in ``text``."""
    home = _home()
    return re.sub(rf"(?<![\w.-]){re.escape(home)}(?![\w-]|\.\w)", "~", text) if home else text


def expand_home(text: str) -> str:
    """Undo ``abbreviate_home``. A literal ``~`` is taken for the home folder."""
    home = _home()
    return re.sub(r"(?<![\w.-])~(?![\w-]|\.\w)", lambda _: home, text) if home else text


def _home() -> str:
    home = os.path.expanduser("~").rstrip("/")
    return home if os.path.isabs(home) else ""


def _words(name: str) -> set[str]:
    return {word.lower() for word in _WORD.findall(name)}


def _hide_value(name: str, value: str) -> str:
    if not is_secret_name(name):
        return _hide_in_argument(value)
    is_size = _NUMBER.fullmatch(value) and not QUANTITY_WORDS.isdisjoint(_words(name))
    return value if is_size else REDACTED


def _hide_in_argument(argument: str) -> str:
    assignment = _ASSIGNMENT.fullmatch(argument)
    if assignment and is_secret_name(assignment[1]):
        return f"{assignment[1]}={_hide_value(assignment[1], assignment[2])}"
    return _URL_CREDENTIALS.sub(rf"\1{REDACTED}@", _PAIR.sub(_hide_pair, argument))


def _hide_pair(pair: re.Match[str]) -> str:
    name, separator, value = pair.groups()
    hidden = _hide_value(name, value) if is_secret_name(name) else _PAIR.sub(_hide_pair, value)
    return f"{name}{separator}{hidden}"
