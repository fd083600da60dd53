"""Secrets and personal data in source files: found by form and surroundings, replaced by stable typed placeholders.

GLM-5's code corpus goes through the same step as The Stack's: keys, e-mail addresses, IP addresses and phone numbers are
replaced before deduplication. Within one file the same value gets the same placeholder (`<EMAIL_1>`), so that a program
that uses a name twice still does. What a value was is never logged or counted by itself: only types are.

Look at a file's findings (types and places, no values):  python -m tasks.secrets FILE ...
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TYPES = ("PRIVATE_KEY", "AWS_KEY", "GITHUB_TOKEN", "GOOGLE_KEY", "SLACK_TOKEN", "API_KEY", "JWT", "SECRET", "PASSWORD_URL",
         "EMAIL", "IP_ADDRESS", "PHONE")  # fmt: skip

# (type, lower-case texts without one of which the pattern cannot match, pattern; group "v" is the value, else all of it).
# Patterns start with a literal where they can: Python's re is ten times faster then. What stands before is looked at after.
_FORMS: tuple[tuple[str, tuple[str, ...], re.Pattern], ...] = tuple(
    (kind, needs, re.compile(pattern, re.ASCII))
    for kind, needs, pattern in (
        ("PRIVATE_KEY", ("private key",),
         r"-----BEGIN (?P<k>(?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?)-----(?P<v>"
         r"(?:(?!-----)[A-Za-z0-9+/=\\\s\"':,.;()|*#>-]){40,}?)"
         r"-----END (?P=k)-----"),
        ("AWS_KEY", ("akia", "asia", "abia", "acca"), r"(?<![A-Za-z0-9])(?:AKIA|ASIA|ABIA|ACCA)[A-Z2-7]{16}(?![A-Za-z0-9])"),
        ("AWS_KEY", ("aws",),
         r"(?i:aws.{0,24}(?:secret|private).{0,24}?[=:>]\s{0,3}[\"']?)(?P<v>[A-Za-z0-9/+]{40})(?![A-Za-z0-9/+=])"),
        ("GITHUB_TOKEN", ("ghp_", "gho_", "ghu_", "ghs_", "ghr_"),
         r"(?<![A-Za-z0-9])gh[pousr]_[A-Za-z0-9]{36,251}(?![A-Za-z0-9])"),
        ("GITHUB_TOKEN", ("github_pat_",), r"github_pat_[A-Za-z0-9_]{60,}"),
        ("GOOGLE_KEY", ("aiza",), r"(?<![A-Za-z0-9])AIza[A-Za-z0-9_-]{35}(?![A-Za-z0-9_-])"),
        ("GOOGLE_KEY", ("gocspx-", "ya29."), r"(?<![A-Za-z0-9])(?:GOCSPX-[A-Za-z0-9_-]{28}|ya29\.[A-Za-z0-9_-]{30,})"),
        ("SLACK_TOKEN", ("xox",), r"(?<![A-Za-z0-9])xox[abeoprs]-[A-Za-z0-9-]{10,}[A-Za-z0-9]"),
        ("SLACK_TOKEN", ("hooks.slack.com",), r"hooks\.slack\.com/services/(?P<v>T[A-Z0-9]{7,}/B[A-Z0-9]{7,}/[A-Za-z0-9]{20,})"),
        ("API_KEY", ("sk_live_", "rk_live_"), r"(?<![A-Za-z0-9])[sr]k_live_[A-Za-z0-9]{20,}"),
        ("API_KEY", ("sk-",), r"(?<![A-Za-z0-9-])sk-(?:proj-|ant-[a-z0-9]+-|svcacct-)?[A-Za-z0-9_-]{32,}(?![A-Za-z0-9])"),
        ("API_KEY", ("npm_", "pypi-ag", "glpat-", "hf_", "dop_v1_", "shpat_", "sg."),
         r"(?<![A-Za-z0-9_])(?:npm_[A-Za-z0-9]{36}|pypi-AgEIcHlwaS[A-Za-z0-9_-]{50,}|glpat-[A-Za-z0-9_-]{20}|hf_[A-Za-z]{34}"
         r"|dop_v1_[a-f0-9]{64}|shpat_[a-f0-9]{32}|SG\.[A-Za-z0-9_-]{22}\.[A-Za-z0-9_-]{43})(?![A-Za-z0-9])"),
        ("JWT", ("eyj",), r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{16,}"),
        ("PASSWORD_URL", ("://",), r"://[^\s:/@\"'<>$%{}()\\]{1,64}:(?P<v>[^\s:/@\"'<>$%{}()\\\[\]*]{6,64})@(?P<h>[\w.-]+)"),
        ("SECRET", ("secret", "token", "passw", "pwd", "key", "credential", "auth"),
         r"(?i:(?:secret|token|passw(?:or)?d|pwd|api_?-?key|access_?-?key|auth_?-?key|private_?-?key|credential)[\w-]{0,20}"
         r"[\"'\]]{0,2}\s{0,4}(?::=|=>|[=:])\s{0,4}(?:[bru]{0,2}|@)[\"'`])(?P<v>[A-Za-z0-9+/=_.!@#$%^&*()~-]{16,200})[\"'`]"),
        ("SECRET", ("secret", "token", "passw", "key"),  # a line of an .env file
         r"(?m)^(?:export )?[A-Z0-9_]{0,64}(?:SECRET|TOKEN|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|PRIVATE_KEY)[A-Z0-9_]{0,64}="
         r"(?P<v>[A-Za-z0-9+/=_.!@#$%^&*()~-]{16,200})\r?$"),
        ("EMAIL", ("@",),
         r"@(?P<h>(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,62}[A-Za-z0-9])?\.)+(?:[a-z]{2,18}|[A-Z]{2,18}))(?![\w@-]|\.\w|\()"),
        ("IP_ADDRESS", (".",), r"[0-9]\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]"),
        ("IP_ADDRESS", (":",), r":[0-9A-Fa-f]{0,4}:[0-9A-Fa-f]{0,4}:"),
        ("PHONE", ("tel:",), r"\btel:(?P<v>\+?[\d().-]{9,20})(?![\w.+-])"),
        ("PHONE", ("+",), r"\+(?P<v>[1-9]\d{0,2}[ .-]?\(?\d{1,4}\)?(?:[ .-]\d{2,4}){2,4})(?![\w.+-])"),
    )
)  # fmt: skip
_RESERVED_HOSTS = re.compile(
    r"(?i)(^|\.)(example|test|invalid|localhost|local|localdomain|internal|lan|corp|home)$|(^|\.)example\.(com|org|net|edu|co|io)$"
    r"|(^|\.)(domain|mydomain|yourdomain|company|email|foo|bar|acme|host|server|site|test|sample|bigcorp|foobar)\.(com|org|net|tld|io)$"
    r"|^(noreply|users\.noreply)\.github\.com$|^(x|y|a|b|c)\.(com|org|net)$|\.(png|jpe?g|gif|svg|webp|js|css|py|ts|tsx|html)$"
)
_PUBLIC_BOXES = re.compile(r"(?i)^(git|noreply|no-reply|donotreply|postmaster|abuse|you|user|username|name|someone|foo"
                           r"|bar|test|me|your[._-]?(name|email)|first[._-]?last|example|admin|root|email|jdoe"
                           r"|john[._]?doe|jane[._]?doe)$")  # fmt: skip
_PLACEHOLDER = re.compile(
    r"(?i)example|sample|dummy|placeholder|change.?me|your[-_. ]|my[-_. ]?(secret|token|key|pass)|xxxx|\*{3}|<[^>]*>|\$\{|\{\{"
    r"|%\(|fake|test|foobar|insert|replace|todo|redacted|secret|passw|token|default|undefined|none|null|abcdef|123456|qwerty|deadbeef|000000"
)
_NOT_SECRET_LINE = re.compile(
    r"(?i)sha(1|224|256|384|512)|\bmd5|checksum|integrity|\bhash|digest|uuid|guid|commit|revision|fingerprint|etag|version|nonce_size"
)
_UUID = re.compile(r"(?i)^[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}$")
_HEX = re.compile(r"(?i)^(0x)?[0-9a-f]+$")
_WORDS = re.compile(
    r"^[a-z]+([-_.][a-z]+)*$|^[A-Z]+([-_.][A-Z]+)*$|^([A-Z]?[a-z]{2,}){2,}$|^[\w-]+(\.[A-Za-z_][\w-]*)+$"
)
_IP_CONTEXT = re.compile(r"(?i)version|\bver\b|release|rev\b|build|\bv$|section|chapter|§|oid\b|\brfc|firmware|driver"
                         r"|chrome|firefox|safari|mozilla|opera|user.?agent|webkit|assembly|oid")  # fmt: skip


_BOX = re.compile(r"(?<![\w.+%/@=-])(?<!(?<!mailto):)[A-Za-z0-9][A-Za-z0-9._%+-]{0,63}$", re.ASCII)
_ADDRESS = re.compile(r"[0-9A-Fa-f:.]+")


@dataclass(frozen=True, slots=True)
class Finding:
    """One value: where it stands in the text and what it is."""

    kind: str
    start: int
    end: int


def entropy(text: str) -> float:
    """Shannon entropy of a text's characters in bits per character."""
    counts = Counter(text)
    return -sum(n / len(text) * math.log2(n / len(text)) for n in counts.values()) if text else 0.0


def _random_looking(value: str, line: str) -> bool:
    """Whether an assigned value is more likely a key than a name, a hash, a UUID, a path or a placeholder."""
    if (
        value.endswith("..")
        or _PLACEHOLDER.search(value)
        or _UUID.match(value)
        or _WORDS.match(value)
        or _NOT_SECRET_LINE.search(line)
    ):
        return False
    if _HEX.match(value):  # hashes have these lengths; keys in hexadecimal are told from them by their name alone
        return (
            len(value) in (32, 40, 48, 64)
            and entropy(value) > 3.0
            and re.search(r"(?i)secret|api_?key|token", line) is not None
        )
    kinds = sum(bool(re.search(p, value)) for p in (r"[a-z]", r"[A-Z]", r"\d", r"(?:[!@#$%^&*()+].*){4}"))
    if kinds < 3 or value.count(".") > 3 or re.search(r"[/.]{1}[a-z]+\.[a-z]+$|^/|^\./|/.*/.*/", value):
        return False
    switches = sum(_kind(a) != _kind(b) for a, b in zip(value, value[1:]))
    return entropy(value) >= 3.5 and switches >= 0.3 * len(value)


def _kind(character: str) -> int:
    return 0 if character.islower() else 1 if character.isupper() else 2 if character.isdigit() else 3


def _jwt(value: str) -> bool:
    head = value.partition(".")[0]
    try:
        found = json.loads(base64.urlsafe_b64decode(head + "=" * (-len(head) % 4)))
    except (ValueError, binascii.Error):
        return False
    return isinstance(found, dict) and bool({"alg", "typ", "enc"} & found.keys())


def _email(value: str, host: str) -> bool:
    box = value.partition("@")[0]
    if re.search(r"(?i)x{4}|^(this|super|self)$", box) or _RESERVED_HOSTS.search(host) or _PUBLIC_BOXES.match(box):
        return False
    return not box.isdigit() or len(box) > 4  # 2@3.x.io is no address


def _public_ip(value: str, before: str) -> bool:
    """Whether an address routes on the public Internet and stands where no version number would."""
    try:
        address = ipaddress.ip_address(value)
    except ValueError:
        return False
    if not address.is_global or address.is_multicast or address.is_reserved or address.is_unspecified:
        return False
    if address.version == 4:
        parts = [int(p) for p in value.split(".")]
        if _IP_CONTEXT.search(before) or value in (
            "8.8.8.8",
            "8.8.4.4",
            "1.1.1.1",
            "1.0.0.1",
            "9.9.9.9",
            "1.2.3.4",
            "4.3.2.1",
        ):
            return False
        return not (
            parts[0] < 3
            or max(parts) < 24
            or parts[2:] == [0, 0]
            or sorted(parts) == parts == list(range(parts[0], parts[0] + 4))
        )
    return value.count(":") >= 3 and not address.is_link_local and len(value.replace(":", "")) >= 8


def find(text: str) -> list[Finding]:
    """Every secret and personal datum in a text, in order, none overlapping another; earlier types of _FORMS win."""
    lower = text.lower()
    found: list[Finding] = []
    for kind, needs, pattern in _FORMS:
        if any(n in lower for n in needs):
            found += _matches(kind, pattern, text)
    found.sort(key=lambda f: (f.start, -f.end))
    kept: list[Finding] = []
    for finding in found:
        if not kept or finding.start >= kept[-1].end:
            kept.append(finding)
    return kept


def _around(text: str, start: int, end: int) -> tuple[int, int]:
    """The span of address characters around a part of one; an empty span where a word or more digits touch it."""
    first = start
    while first > 0 and start - first < 40 and (text[first - 1] in "0123456789abcdefABCDEF:."):
        first -= 1
    match = _ADDRESS.match(text, first, end + 40)
    last = match.end() if match else end
    while last > end and text[last - 1] in ".:" and text[last - 2 : last] != "::":
        last -= 1
    port = re.fullmatch(r"(\d{1,3}(?:\.\d{1,3}){3}):\d{1,5}", text[first:last])
    last = first + port.end(1) if port else last
    before = text[first - 1 : first] if text[first - 2 : first] != "//" else ""
    touches = re.match(r"[\w/-]", before) or re.match(r"[\w-]", text[last : last + 1])
    return (first, first) if touches else (first, last)


def _matches(kind: str, pattern: re.Pattern, text: str) -> Iterator[Finding]:
    named = "v" in pattern.groupindex
    for match in pattern.finditer(text):
        start, end = match.span("v") if named else match.span()
        if kind == "EMAIL":
            box = _BOX.search(text, max(0, start - 66), start)
            if not box:
                continue
            start = box.start()
        elif kind == "IP_ADDRESS":
            start, end = _around(text, start, end)
        elif kind == "PHONE" and re.match(r"[\w.+*/=)\]-]", text[match.start() - 1 : match.start()]):
            continue
        value = text[start:end]
        line_start = text.rfind("\n", 0, match.start()) + 1
        line_end = text.find("\n", end)
        line = text[line_start : line_end if line_end >= 0 else len(text)][:1000]
        fine = True
        if kind == "SECRET":
            fine = _random_looking(value, line)
        elif kind == "JWT":
            fine = _jwt(value)
        elif kind == "EMAIL":
            fine = _email(value, match["h"])
        elif kind == "PASSWORD_URL":
            fine = not (
                _PLACEHOLDER.search(value)
                or _RESERVED_HOSTS.search(match["h"])
                or value.lower() in ("pass", "passwd", "user")
            )
            fine = fine and entropy(value) > 2.0 and not re.match(r"^[a-z]+$|^[A-Z_]+$|^[A-Z][a-z]+$", value)
        elif kind == "IP_ADDRESS":
            fine = text[end : end + 1] != "/" or text[start - 2 : start] == "//"  # else a network
            fine = fine and _public_ip(value, text[max(line_start, start - 40) : start])
        elif kind == "PHONE":
            digits = sum(c.isdigit() for c in value)
            fine = 9 <= digits <= 15 and not re.search(r"555", value)
        elif kind in ("AWS_KEY", "GOOGLE_KEY", "GITHUB_TOKEN", "API_KEY", "SLACK_TOKEN"):
            fine = not re.search(r"(?i)example|x{6}|your|1234567890|abcdefghij", value) and entropy(value) > 2.8
        elif kind == "PRIVATE_KEY":
            fine = sum(c.isalnum() for c in value) >= 64
        if fine:
            yield Finding(kind, start, end)


def redact(text: str) -> tuple[str, Counter[str]]:
    """(the text with typed placeholders in place of every finding, findings per type).

    Within a text equal values get equal placeholders, numbered by first appearance: the result depends on nothing else.
    """
    findings = find(text)
    if not findings:
        return text, Counter()
    names: dict[tuple[str, str], str] = {}
    numbers: Counter[str] = Counter()
    pieces, last = [], 0
    for finding in findings:
        value = (finding.kind, text[finding.start : finding.end])
        if value not in names:
            numbers[finding.kind] += 1
            names[value] = f"<{finding.kind}_{numbers[finding.kind]}>"
        pieces += [text[last : finding.start], names[value]]
        last = finding.end
    pieces.append(text[last:])
    return "".join(pieces), Counter(f.kind for f in findings)


def main() -> None:
    for name in sys.argv[1:]:
        text = Path(name).read_text(encoding="utf-8", errors="replace")
        for finding in find(text):
            print(
                f"{name}:{text.count(chr(10), 0, finding.start) + 1}: {finding.kind}, {finding.end - finding.start} characters"
            )


if __name__ == "__main__":
    main()
