"""What `tools/fit.py` found, as a page with bars of a device's memory, and as the table of docs/meshes.md."""

import html

from north_jax.parallel import PRESETS

# Component -> colour; what remains is the batch, activations, gradients and the compiler's own temporaries.
PARTS = {"parameters": "#2b6cb0", "optimizer": "#805ad5", "activations and all the rest": "#dd6b20"}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; color: #1a202c }
table { border-collapse: collapse; width: 100% }
td, th { padding: .35rem .6rem; text-align: right; white-space: nowrap }
th { border-bottom: 2px solid #cbd5e0; font-weight: 600 } td { border-bottom: 1px solid #e2e8f0 }
td:first-child, th:first-child, td.bar { text-align: left } td.bar { width: 26rem }
.track { position: relative; height: 1.1rem; background: #edf2f7; border-radius: 3px; overflow: hidden; display: flex }
.track span { height: 100% } .limit { position: absolute; left: 90%; width: 2px; background: #1a202c }
.no { color: #c53030; font-weight: 600 } small { color: #4a5568 }
.key span { display: inline-block; width: .9rem; height: .9rem; border-radius: 2px; margin: 0 .4rem 0 1rem }
"""


def in_gib(cell: dict) -> dict[str, float]:
    """Its sizes by name without "_bytes", and "sent", all transfers together."""
    sizes = {name.removesuffix("_bytes"): size for name, size in cell.items() if name.endswith("_bytes")}
    sizes["sent"] = sum(one["bytes"] for one in cell["collectives"])
    return {name: size / 2**30 for name, size in sizes.items()}


def page(versions: dict, cells: list[dict]) -> str:
    """One self-contained HTML file of the cells that `fit.figures` gives."""
    key = "".join(f'<span style="background:{colour}"></span>{name}' for name, colour in PARTS.items())
    said = ", ".join(f"{name} {value}" for name, value in versions.items())
    columns = (
        "slice and mesh|job|rows|memory of a device, GiB||fits|FLOPs, s|sent, GiB|transfers, s|MFU at most|compiled"
    )
    head = "".join(f"<th>{column}</th>" for column in columns.split("|"))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>What fits, per compiler</title>'
        f"<style>{_STYLE}</style><h1>What fits, per compiler</h1><p>North Mini Code's training step, compiled for the"
        " chips without the chips. Nothing here was measured: memory is what the compiler plans, seconds are FLOPs by"
        " count over the data sheet's peak and bytes sent over its links. The line is nine tenths of the memory."
        f'</p><p class="key">{key}</p><table><tr>{head}</tr>{"".join(map(_row, cells))}</table>'
        f"<p><small>{html.escape(said)}</small></p></html>\n"
    )


def _row(cell: dict) -> str:
    name = f"{html.escape(cell['slice'])}<br><small>{html.escape(cell['mesh'])}</small>"
    job = f"{cell['job'].upper()} {cell['sequence'] // 1024}K<br><small>{html.escape(cell['remat'])}</small>"
    if "error" in cell:
        return f'<tr><td>{name}<td>{job}<td>{cell["rows"]}<td colspan="8" class="no">{html.escape(cell["error"])}</tr>'
    gib = in_gib(cell)
    sizes = gib["parameters"], gib["optimizer"], gib["total"] - gib["parameters"] - gib["optimizer"]
    bars = "".join(
        f'<span title="{part}: {size:.1f} GiB" style="width:{100 * size / gib["capacity"]:.2f}%;background:{colour}">'
        "</span>"
        for (part, colour), size in zip(PARTS.items(), sizes, strict=True)
    )
    values = (
        f"{gib['total']:.1f} of {gib['capacity']:.0f}",
        "yes" if cell["fits"] else '<span class="no">no</span>',
        f"{cell['computing_seconds']:.1f}",
        f"{gib['sent']:,.0f}",
        f"{cell['sending_seconds']:.1f}",
        f"{cell['mfu_at_most']:.0%}",
        f"{cell['compile_seconds']:.0f} s<br><small>{gib['host']:.1f} GiB</small>",
    )
    track = f'<div class="track">{bars}<div class="limit" style="height:100%"></div></div>'
    return f'<tr><td>{name}<td>{job}<td>{cell["rows"]}<td class="bar">{track}{"".join(f"<td>{v}" for v in values)}</tr>'


def table(cells: list[dict]) -> str:
    """The cells in Markdown, by job and length, and by the order of the presets."""
    names = {preset.slice: name for name, preset in PRESETS.items()}
    columns = (
        "slice | job | rows | parameters | optimizer | total | of | fits | sent | FLOPs, s | transfers, s |"
        " compiled, s (of a core) | host"
    )
    lines = [f"| {columns} |", "|" + " --- |" * len(columns.split("|"))]
    for cell in sorted(cells, key=lambda cell: (cell["job"] != "sft", cell["sequence"], [*names].index(cell["slice"]))):
        said = f"{names[cell['slice']]} | {cell['job'].upper()} {cell['sequence'] // 1024}K | {cell['rows']}"
        if "error" in cell:
            lines.append(f"| {said} | {cell['error']} |")
            continue
        gib = in_gib(cell)
        lines.append(
            f"| {said} | {gib['parameters']:.1f} | {gib['optimizer']:.1f} | {gib['total']:.1f} | {gib['capacity']:.0f}"
            f" | {'yes' if cell['fits'] else 'no'} | {gib['sent']:,.0f} | {cell['computing_seconds']:.1f}"
            f" | {cell['sending_seconds']:.1f} | {cell['compile_seconds']:.0f} ({cell['compile_cpu_seconds']:.0f})"
            f" | {gib['host']:.1f} |"
        )
    return "\n".join(lines) + "\n"
