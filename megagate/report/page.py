"""The report as one HTML file that needs nothing else: no script, no network; for paper, a light and a dark screen."""

from collections.abc import Sequence
from html import escape

from megagate.report import style
from megagate.report.builder import Drawn, Section
from megagate.report.runs import Run
from megagate.report.tables import Table

CSS = """
:root { color-scheme: light dark;
        --ground: #ffffff; --text: #1d1f23; --quiet: #55585f; --line: #c9ccd2; --link: #0b5cad; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #15181c; --text: #e4e6ea; --quiet: #a9adb6; --line: #40444c; --link: #7db8f2; }
}
body { margin: 0 auto; max-width: 62rem; padding: 1rem 1.25rem 3rem; background: var(--ground); color: var(--text);
       font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; } h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
h3 { margin-bottom: 0.25rem; }
a { color: var(--link); } nav ul { display: flex; flex-wrap: wrap; gap: 0.25rem 1.25rem; padding: 0; list-style: none; }
figure { margin: 1rem 0 1.5rem; } figure svg { display: block; width: 100%; height: auto; }
figcaption, caption, .quiet { color: var(--quiet); font-size: 0.9rem; text-align: left; }
.scroll { overflow-x: auto; }
table { min-width: min(100%, 42rem); border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
caption { padding-bottom: 0.4rem; } th, td { padding: 0.25rem 0.8rem 0.25rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); overflow-wrap: break-word; max-width: 24rem; }
@media print {
  :root { color-scheme: light;
          --ground: #ffffff; --text: #000000; --quiet: #333333; --line: #999999; --link: #000000; }
  body { max-width: none; padding: 0; font-size: 10pt; } nav { display: none; } .scroll { overflow: visible; }
  figure, tr { break-inside: avoid; } h2, h3 { break-after: avoid; }
  table { font-size: 7.5pt; }
}
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""A browser then asks for nothing, whatever the page holds."""


def page(runs: Sequence[Run], summary: Table, differences: Sequence[Table], sections: Sequence[Section]) -> str:
    """Return the HTML; `differences` are the arguments that differ, and those that some runs lack."""
    title = f"Training report: {', '.join(run.name for run in runs)}"
    links = [
        ("summary", "Summary"),
        ("configuration", "Configuration"),
        *((part.name, part.title) for part in sections),
    ]
    items = "".join(f'<li><a href="#{name}">{escape(text)}</a></li>' for name, text in links)
    body = [
        f"<header><h1>{escape(title)}</h1></header>",
        f'<nav aria-label="Sections"><ul>{items}</ul></nav>',
        "<main>",
        f'<section id="summary"><h2>Summary</h2>{_table(summary, "Summary")}{_notes(runs)}</section>',
        f'<section id="configuration"><h2>Configuration</h2>{_differences(runs, *differences)}</section>',
        *(_section(section) for section in sections),
        "</main>",
    ]
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>",
            *body,
            "</body>\n</html>\n",
        ]
    )


def _table(table: Table, label: str) -> str:
    """Return the table in a region that the keyboard can scroll; `label` is the region's."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.header)
    rows = []
    for first, *rest in table.rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        rows.append(f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>')
    caption = f"<caption>{escape(table.caption)}</caption>"
    body = "\n".join(rows)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(label, quote=True)}"><table>{caption}'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _details(title: str, table: Table) -> str:
    return f"<details><summary>{escape(title)}</summary>{_table(table, title)}</details>"


def _notes(runs: Sequence[Run]) -> str:
    """Return what a reader must know about single runs."""
    notes = []
    for run in runs:
        notes += [f"{run.name}: {note}." for note in run.notes]
        if run.dropped:
            notes.append(
                f"{run.name}: {run.dropped:,} points are left out that it had logged beyond the checkpoint from which "
                f"it was then resumed."
            )
        if run.tokens is None:
            notes.append(
                f"{run.name}: the sequence length or the consumed samples are not recorded, so its tokens are unknown."
            )
    return f'<ul class="quiet">{"".join(f"<li>{escape(note)}</li>" for note in notes)}</ul>' if notes else ""


def _differences(runs: Sequence[Run], differ: Table, lacking: Table) -> str:
    unknown = [run.name for run in runs if not run.arguments]
    said = f'<p class="quiet">The arguments of {escape(", ".join(unknown))} are not recorded.</p>' if unknown else ""
    if lacking.rows:
        said += _details(f"{len(lacking.rows)} arguments that some of the runs do not have", lacking)
    if differ.rows:
        return _table(differ, "Arguments that differ") + said
    if len(runs) - len(unknown) > 1:
        return f"<p>The arguments that these runs share are the same.</p>{said}"
    return f"<p>There is nothing to compare.</p>{said}"


def _section(section: Section) -> str:
    drawn = "\n".join(_figure(each) for each in section.drawn)
    missing = ""
    if section.missing:
        missing = f'<p class="quiet">None of these runs has logged: {escape("; ".join(section.missing))}.</p>'
    return f'<section id="{section.name}"><h2>{escape(section.title)}</h2>\n{drawn}{missing}</section>'


def _figure(drawn: Drawn) -> str:
    svg = style.to_svg(drawn.figure, drawn.name, escape(drawn.title, quote=True))
    numbers = _details("Numbers", drawn.numbers) if drawn.numbers else ""
    heading = f"<h3>{escape(drawn.title)}</h3>"
    return f"{heading}<figure>{svg}<figcaption>{escape(drawn.caption)}</figcaption></figure>{numbers}"
