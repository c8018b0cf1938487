"""A table as plain text and as Markdown."""

import textwrap

from megagate.report.tables import Table

WIDTH = 120


def aligned(table: Table) -> str:
    """Return the table in columns, under it its caption."""
    rows = [table.header, *table.rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    body = "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])
    return f"{body}\n\n{textwrap.fill(table.caption, WIDTH)}" if table.caption else body


def markdown(table: Table) -> str:
    """Return the table as Markdown, under it its caption."""
    rows = [table.header, ["---"] * len(table.header), *table.rows]
    body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
    return f"{body}\n\n{table.caption}\n" if table.caption else f"{body}\n"
