"""Leaves secret values out of texts that are recorded, or pasted into a bug report.

A value is secret by its name, such as `API_TOKEN` or `--password`, or by its form, such as `https://user:password@host`.

Synopsis:

    >>> hide("train --password abc --data-dir https://me:abc@example.com/data --batch-size 32")
    "train --password '(left out)' --data-dir https://...@example.com/data --batch-size 32"
    >>> hide('{"cluster": {"worker": ["a:1"]}, "password": "abc"}')
    '{"cluster": {"worker": ["a:1"]}, "password": "(left out)"}'
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "(left out)"

# Parts of a name that always announce a secret.
_SECRET_PARTS = re.compile("passw|passphrase|passcode|secret|credential|cookie|bearer|apikey|privatekey")
_SECRET_WORDS = re.compile(r"(?:pass|pwd?|psw|pswd|pat|creds?|jwt|psk|sas|sig|signature|authorization)\d*")
# Words that may also mean something else, such as `key_dim=64`, so that a small number is not secret.
_USUALLY_SECRET_WORDS = re.compile(r"\w*?(?:key|token|auth|cred)s?\d*")
_HARMLESS = re.compile(r"\s*(?:-?\d{0,5}(?:\.\d*)?|true|false|none|null)\s*", re.IGNORECASE)
# A name with one of these last words is that of a file.
_WORDS_OF_FILES = ("file", "path", "dir", "folder")

_FORMS = (
    # The user and the password of a URL. A password may have an `@` itself.
    (re.compile(r"://[^\s\"'`,;]*@"), "://...@"),
    (re.compile(r"(?<![\w/.])[\w.+%-]+:[^\s@/,\"'`]+@(?=[\w\[])"), "...@"),
    (re.compile(r"\b(bearer|basic)\s+[\w.~+/=-]{4,}", re.IGNORECASE), rf"\1 {HIDDEN}"),
    (re.compile(r"(?<=://hooks\.slack\.com/services/)[\w/]+"), HIDDEN),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), HIDDEN),
    # The tokens of GitHub, GitLab, Hugging Face, Slack, OpenAI, Amazon, Google, and JSON web tokens.
    (
        re.compile(
            r"\b(?:gh[opsur]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|hf_\w{16,}|xox[a-z]-[\w-]{10,}|sk-[\w-]{16,}|"
            r"A[KS]IA[0-9A-Z]{16}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]+(?:\.[\w-]*)?)"
        ),
        HIDDEN,
    ),
)
_VALUE = (
    r"""[^\s,;&"'`}\])(]*\(left\ out\)|"(?:[^"\\]|\\.)*"?|'(?:[^'\\]|\\.)*'?|\[[^\]]*\]?|\{[^}]*\}?|[^\s,;&"'`}\])]+"""
)
_PAIR = re.compile(rf"""(?P<name>[\w.-]+)(?P<between>["']?\s*[=:]\s*)(?P<value>{_VALUE})""", re.VERBOSE)
_OPTION = re.compile(rf"""(?P<name>(?<![\w-])--[\w.-]+)(?P<between>\s+)(?P<value>(?!--)(?:{_VALUE}))""", re.VERBOSE)


def is_secret(name: str, value: object = None) -> bool:
    """Whether the value of a variable, an option or a key with this name must not be shown; `None` if it is unknown."""
    words = re.findall("[a-z0-9]+", re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())
    if not words or words[-1] in _WORDS_OF_FILES:
        return False
    if _SECRET_PARTS.search("".join(words)) or any(map(_SECRET_WORDS.fullmatch, words)):
        return True
    harmless = value is not None and _HARMLESS.fullmatch(str(value)) is not None
    return not harmless and any(map(_USUALLY_SECRET_WORDS.fullmatch, words))


def hide(text: str) -> str:
    """A text without secret values: the value of a variable, a command line, JSON, or a sentence."""
    try:
        content = json.loads(text)
    except ValueError:
        return hide_in_sentence(_hide_in_command_line(text))
    if not isinstance(content, dict | list):
        return hide_in_sentence(text)
    hidden = _hide_in_json(content)
    return text if hidden == content else json.dumps(hidden)


def hide_in_command(words: Sequence[str]) -> list[str]:
    """The words of a command without the secret values of options and settings."""
    return [
        HIDDEN if _is_value_of_secret(before, word) else _hide_in_word(word)
        for before, word in zip(["", *words], words, strict=False)
    ]


def hide_in_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by name without secret values."""
    return {name: HIDDEN if is_secret(name, value) else _hide_in_json(value) for name, value in options.items()}


def hide_in_sentence(text: str) -> str:
    """A sentence, such as an error message, without secret values."""
    for form, replacement in _FORMS:
        text = form.sub(replacement, text)
    return _OPTION.sub(_without_secret, _PAIR.sub(_without_secret, text))


def _is_value_of_secret(before: str, word: str) -> bool:
    return before.startswith("-") and "=" not in before and not word.startswith("--") and is_secret(before, word)


def _hide_in_word(word: str) -> str:
    """`name=value` without a secret value, which may have spaces; the value may be a setting itself."""
    setting = re.fullmatch(r"(-*[\w.-]+)=(.*)", word, re.DOTALL)
    if setting is None:
        return hide_in_sentence(word)
    name, value = setting.groups()
    return f"{name}={HIDDEN if is_secret(name, value) else _hide_in_word(value)}"


def _hide_in_command_line(text: str) -> str:
    try:
        words = shlex.split(text)
    except ValueError:  # not a command line
        return text
    hidden = hide_in_command(words)
    return text if hidden == words else shlex.join(hidden)


def _hide_in_json(content: Any) -> Any:
    if isinstance(content, Mapping):
        return hide_in_options(content)
    if isinstance(content, list | tuple):
        hidden = [_hide_in_json(part) for part in content]
        return hidden if isinstance(content, list) else tuple(hidden)
    return hide_in_sentence(content) if isinstance(content, str) else content


def _without_secret(pair: re.Match[str]) -> str:
    name, between, value = pair.group("name", "between", "value")
    if not is_secret(name, value.strip("\"'")):
        return name + between + _PAIR.sub(_without_secret, value)
    quote = value[0] if value[0] in "\"'" else ""
    return f"{name}{between}{quote}{HIDDEN}{quote}"
