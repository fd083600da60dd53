"""What is redacted, what is not, and that nothing of a value is kept."""

from __future__ import annotations

import random
import string
import sysconfig
import uuid
from collections import Counter
from pathlib import Path

import pytest

from tasks import secrets


def rand(seed: int, size: int, alphabet: str = string.ascii_letters + string.digits) -> str:
    return "".join(random.Random(seed).choices(alphabet, k=size))


KEY_BODY = "\n".join(rand(i, 64) for i in range(6))
FOUND = [  # values are put together here, so that this file itself holds none
    ("AWS_KEY", 'aws_access_key_id = "' + "AKIA" + rand(1, 16, string.ascii_uppercase + "234567") + '"\n'),
    ("AWS_KEY", "aws_secret_access_key = " + rand(2, 40) + "\n"),
    ("GITHUB_TOKEN", "token: " + "ghp_" + rand(3, 36) + "\n"),
    ("GITHUB_TOKEN", "x = 'github_pat_" + rand(4, 82) + "'\n"),
    ("GOOGLE_KEY", "const key = '" + "AIza" + rand(5, 35) + "';\n"),
    ("SLACK_TOKEN", "SLACK=" + "xoxb-" + rand(6, 12, string.digits) + "-" + rand(7, 24) + "\n"),
    ("API_KEY", "stripe.api_key = " + "sk_live_" + rand(8, 24) + "\n"),
    ("API_KEY", "OPENAI=" + "sk-proj-" + rand(9, 48) + "\n"),
    ("PRIVATE_KEY", "-----BEGIN RSA PRIVATE KEY-----\n" + KEY_BODY + "\n-----END RSA PRIVATE KEY-----\n"),
    ("PRIVATE_KEY",
     'KEY = "-----BEGIN PRIVATE KEY-----\\n' + rand(10, 64) + "\\n" + rand(11, 64) + '\\n-----END PRIVATE KEY-----"\n'),
    ("JWT", "h = 'eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJ" + rand(12, 30) + "." + rand(13, 43) + "'\n"),
    ("SECRET", 'client_secret = "' + rand(14, 32) + '"\n'),
    ("SECRET", '"apiKey": "' + rand(15, 40) + '",\n'),
    ("PASSWORD_URL", "DATABASE = 'postgres://app:" + rand(16, 12) + "@db.shop.de/main'\n"),
    ("EMAIL", "# Written by Ada Bright <ada.bright@mathlab.dev>\n"),
    ("EMAIL", "mailto:j.smithee@unseen.ac.uk\n"),
    ("IP_ADDRESS", 'HOST = "93.184.216.34"\n'),
    ("IP_ADDRESS", "connect 2a00:1450:4009:81f::200e now\n"),
    ("PHONE", "call +44 20 7946 0958 for help\n"),
]  # fmt: skip
KEPT = [
    'sha256 = "' + rand(1, 64, "0123456789abcdef") + '"\n',
    "commit " + rand(2, 40, "0123456789abcdef") + "\n",
    f'token_id = "{uuid.UUID(int=random.Random(3).getrandbits(128))}"\n',
    'integrity: "sha512-' + rand(4, 86) + '=="\n',
    'DATA = "' + rand(5, 400) + '"\n',
    'key = "content-security-policy"\ntoken = "EndOfFileToken"\nsecret_name = "projects/x/secrets/y"\n',
    'password = "correct-horse-battery"  # prompt\napi_key = "your-api-key-goes-here-1A"\n',
    'secret = "${SECRET_FROM_ENVIRONMENT}"\nauth_token = os.environ["AUTH_TOKEN_A1"]\n',
    "mail = 'user@example.com', 'someone@example.org', 'root@localhost', 'git@github.com'\n",
    "@Override public void run() {}\nthis@Activity.finish()\n@app.route('/a')\n",
    "pip install package@1.2.3 npm i lodash@4.17.21 icon@2x.png\n",
    "version = '4.3.2.1'; release 10.15.7.3; Chrome/96.0.4664.110 Safari\n",
    "for ip in '127.0.0.1', '10.1.2.3', '192.168.1.7', '172.16.9.9', '0.0.0.0', '255.255.255.0', '203.0.113.9', '8.8.8.8'\n",
    "oid = ObjectIdentifier('2.5.29.37')\nnet = '124.42.0.0/16'\n",
    "std::cout << a::b::c; ::1 fe80::1 12:34:56 2001:db8::1\n",
    "x + 1 234 567 890; +1 555 010 9999; 2024-01-02 +0000; a+12 34 56\n",
    "http://user:password@example.com and https://user:${PASS}@host.io\n",
    "-----BEGIN PUBLIC KEY-----\nMIIBIjANBgkqhkiG\n-----END PUBLIC KEY-----\n-----BEGIN PRIVATE KEY-----\n...\n",
]


@pytest.mark.parametrize("kind, text", FOUND)
def test_a_secret_is_replaced_whole(kind, text):
    redacted, counts = secrets.redact("a = 1\n" + text + "b = 2\n")
    assert counts == Counter({kind: 1}) and f"<{kind}_1>" in redacted
    (finding,) = secrets.find(text)
    assert text[finding.start : finding.end] not in redacted
    assert redacted.startswith("a = 1\n") and redacted.endswith("b = 2\n")
    assert secrets.find(redacted) == []  # and a second pass changes nothing


@pytest.mark.parametrize("text", KEPT)
def test_what_is_no_secret_stays(text):
    assert secrets.redact(text) == (text, Counter())


def test_equal_values_share_a_placeholder():
    text = "a: ada@mathlab.dev\nb: bob@mathlab.dev\nc: ada@mathlab.dev\n"
    assert secrets.redact(text)[0] == "a: <EMAIL_1>\nb: <EMAIL_2>\nc: <EMAIL_1>\n"


def test_findings_say_nothing_of_the_value():
    text = FOUND[11][1]
    assert all(
        not isinstance(getattr(f, name), str) or name == "kind" for f in secrets.find(text) for name in f.__slots__
    )


def test_library_code_is_left_alone():
    """Maintained packages hold no keys; what would be found in them beside addresses is a false alarm."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        p
        for name in ("email", "http", "json", "asyncio", "unittest", "xml", "logging")
        for p in (root / name).rglob("*.py")
    ]
    counts: Counter[str] = Counter()
    size = 0
    for path in sorted(files):
        text = path.read_text(encoding="utf-8", errors="replace")
        size += len(text)
        counts += secrets.redact(text)[1]
    counts.pop("EMAIL", None)
    assert size > 1_000_000 and sum(counts.values()) <= 1, counts


def test_keys_with_signs_lines_of_env_files_addresses_with_ports_and_telephone_links():
    django = "x8d!k2@m9#q4$w7%e1^r5&t3*y6(u0)i"
    assert secrets.redact(f'SECRET_KEY = "{django}"')[0] == 'SECRET_KEY = "<SECRET_1>"'
    text = "export DB_PASSWORD=hT7kLm9Qw2xZ8vB4nR6\nDEBUG=1\nAPI_TOKEN=changeme-changeme-1\n"
    assert secrets.redact(text)[0] == "export DB_PASSWORD=<SECRET_1>\nDEBUG=1\nAPI_TOKEN=changeme-changeme-1\n"
    assert secrets.redact("see http://203.104.55.7:8080/x and https://203.104.55.8/y")[0] == (
        "see http://<IP_ADDRESS_1>:8080/x and https://<IP_ADDRESS_2>/y"
    )
    assert secrets.redact('<a href="tel:+14158675309">')[0] == '<a href="tel:<PHONE_1>">'
    kept = (
        "route 203.104.55.0/24 a/203.104.55.7/b x[1]+2 345 678 90 1 f(x)+2 345 678 90 1 "
        + 'key = "lambda(x):[y!z]+(a&b)"'
    )
    assert secrets.redact(kept) == (kept, {})
