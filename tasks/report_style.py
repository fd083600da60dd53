"""The report page's frame: its style sheet for light and dark, and small HTML helpers.

python -m pytest tests/tasks/test_report.py
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

CSS = """
:root{color-scheme:light dark;--paper:#fbfaf8;--card:#fff;--ink:#1d1f23;--muted:#666b75;--grid:#e7e5e0;--line:#dcd9d2;
--accent:#1f5f8b;--good:#1d7a4f;--bad:#b3392f;--band:#f3f1ec;--c0:#1f6fa8;--c1:#d9782d;--c2:#3a9163;--c3:#b0487a;--c4:#7a62b8;
--c5:#8c8a2d}
@media (prefers-color-scheme:dark){:root{--paper:#15171b;--card:#1c1f24;--ink:#e6e6e3;--muted:#9aa0aa;--grid:#2c3037;
--line:#343942;--accent:#7fb6de;--good:#6cc795;--bad:#ee8a80;--band:#1a1d22;--c0:#6fb1e0;--c1:#eda163;--c2:#76c79a;--c3:#df8bb3;--c4:#b3a0e6;
--c5:#cfcc70}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif}
main{max-width:1160px;margin:0 auto;padding:44px 28px 90px}
h1{font-size:34px;line-height:1.2;margin:0 0 6px;letter-spacing:-.01em}
h2{font-size:22px;margin:56px 0 6px;letter-spacing:-.005em}
p{max-width:76ch;margin:6px 0 14px}.lead,.note{color:var(--muted)}.note{font-size:14px}
code{font:13px/1.4 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;background:var(--band);padding:1px 5px;border-radius:4px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(165px,1fr));gap:12px;margin:26px 0 8px}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 16px}
.card b{display:block;font-size:20px;line-height:1.35;font-weight:650;white-space:nowrap;font-variant-numeric:tabular-nums}
.card span{display:block;color:var(--muted);font-size:13px;line-height:1.35;margin-top:2px}
nav{display:flex;flex-wrap:wrap;gap:4px 18px;margin-top:18px;font-size:14px}a{color:var(--accent);text-decoration:none}
a:hover{text-decoration:underline}
.panel{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:18px;margin:14px 0;overflow-x:auto}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(420px,1fr));gap:14px}.grid .panel{margin:0}
svg{display:block;width:100%;height:auto}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th,td{padding:7px 10px;text-align:right;border-bottom:1px solid var(--grid);vertical-align:top;white-space:nowrap}
th{color:var(--muted);font-weight:600;font-size:13px;border-bottom:1px solid var(--line)}
th:first-child,td:first-child,.left{text-align:left}td.wrap{white-space:normal;min-width:200px;overflow-wrap:anywhere}
tr:last-child td{border-bottom:0}td small{display:block;font-size:12px;color:var(--muted)}
td small.in{display:inline;margin-left:8px}
small.good{color:var(--good)}small.bad{color:var(--bad)}.yes{color:var(--good)}.no{color:var(--muted)}
svg text{fill:var(--ink);font:12px system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif}
svg .t{font-weight:600;font-size:14px}svg .m{fill:var(--muted);font-size:11px}svg .s{font-size:10px}svg .b{font-size:13px}
svg .g{stroke:var(--grid)}svg .k{stroke:var(--muted);stroke-dasharray:3 3;opacity:.6}
svg .l{fill:none;stroke-width:1.7;stroke-linejoin:round}
svg .band{fill:var(--band)}svg .phase{fill:var(--muted);font-size:13px;font-weight:600}
svg .node rect{fill:var(--card);stroke:var(--line);stroke-width:1.2}svg .node:hover rect{stroke:var(--accent);stroke-width:2}
svg .n{font-size:12.5px;font-weight:600}svg .c{fill:var(--muted);font-size:11px}
svg .frame{fill:none;stroke:var(--line)}
svg .edge{fill:none;stroke:var(--muted);stroke-width:1.1;opacity:.55}
@media (max-width:640px){main{padding:28px 14px 60px}.grid{grid-template-columns:1fr}}
@media print{body{background:#fff}.panel,.card{break-inside:avoid}}
"""


def page(title: str, body: str) -> str:
    """A whole HTML document that needs nothing from anywhere else."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>\n<body><main>\n{body}\n</main></body></html>\n"
    )


def section(anchor: str, title: str, text: str, content: str) -> str:
    """A titled section; `text` is HTML."""
    return f'<h2 id="{anchor}">{escape(title)}</h2>\n<p class="lead">{text}</p>\n{content}\n'


def panel(content: str) -> str:
    """A framed block that scrolls sideways when it must."""
    return f'<div class="panel">{content}</div>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """An HTML table; cells are HTML already, heads are text. Columns in `left` are aligned left and may wrap."""
    heads = "".join(f"<th{' class=left' if i in left else ''}>{escape(h)}</th>" for i, h in enumerate(head))
    body = "".join(
        "<tr>" + "".join(f"<td{' class=' + chr(34) + 'left wrap' + chr(34) if i in left and i else ''}>{c}</td>"
                         for i, c in enumerate(row)) + "</tr>"
        for row in rows
    )  # fmt: skip
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def card(value: str, text: str) -> str:
    """A headline number."""
    return f'<div class="card"><b>{escape(value)}</b><span>{escape(text)}</span></div>'


def delta(value: float | None, *, lower_is_better: bool, digits: int, inline: bool = False) -> str:
    """A signed difference in the colour of its direction; nothing when it rounds to zero."""
    if value is None or abs(value) < 0.5 * 10**-digits:
        return ""
    good = (value < 0) == lower_is_better
    return f'<small class="{"good" if good else "bad"}{" in" if inline else ""}">{value:+.{digits}f}</small>'
