"""Bytes by pair of ranks and by link, as a picture or as a self-contained page."""

from __future__ import annotations

import base64
import html
import json
from pathlib import Path
from typing import Any

import numpy as np

from ..terminal import seconds, size
from .study import Study

# A picture of at most so many cells has their values written in; on darker cells in white.
_WRITTEN_CELLS, _DARK = 256, 0.6
# Beyond this ratio of the most to the least, colors follow the logarithm.
_ORDERS = 20


def write_heat_map(study: Study, path: Path) -> None:
    """Write bytes from each trainer to each engine rank, and the links' times, to ``path`` (.png or .html).

    With fan-out, rows for the engine ranks that pass on are added.

    Raises:
        OSError: the file can't be written.
    """
    if path.suffix.lower() == ".png":
        _write_png(study, path)
    else:
        path.write_text(_page(study), encoding="utf-8")


def _matrix(study: Study) -> np.ndarray:
    """int64 [senders, engine ranks]: bytes."""
    analysis = study.analysis
    senders = analysis.pair_bytes if analysis.fan_out else analysis.pair_bytes[: analysis.train_ranks]
    return senders[:, analysis.train_ranks :]


def _title(study: Study) -> str:
    analysis = study.analysis
    sides = f"{study.options.model.name}: {analysis.train_ranks} trainer ranks to {analysis.gen_ranks} engine ranks"
    if study.options.hosts.shared_gpus:
        sides += " on the same GPUs"
    return f"{sides}, shard to shard T = {seconds(analysis.bound_seconds)}, predicted {seconds(analysis.predicted_seconds)}"


def _write_png(study: Study, path: Path) -> None:
    # A picture is seldom asked for, and the library is slow to load.
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(13, 6), layout="constrained")
    FigureCanvasAgg(figure)
    pairs, links = figure.subplots(1, 2, width_ratios=(3, 2))
    # Pairs that exchange nothing stay white.
    matrix = np.ma.masked_equal(_matrix(study).astype(float), 0.0)
    least, most = (matrix.min(), matrix.max()) if matrix.count() else (0.0, 1.0)
    scale = LogNorm(least, most) if 0 < _ORDERS * least < most else Normalize(0, most)
    colors = colormaps["viridis"].with_extremes(bad="white")
    train, (rows, columns) = study.analysis.train_ranks, matrix.shape
    image = pairs.imshow(
        matrix,
        aspect="auto",
        interpolation="nearest",
        cmap=colors,
        norm=scale,
        # Ranks as everywhere else: of the refit, trainers first.
        extent=(train - 0.5, train + columns - 0.5, rows - 0.5, -0.5),
    )
    pairs.set(xlabel="receiving engine rank", ylabel="sending rank", title="bytes by pair")
    for axis in (pairs.xaxis, pairs.yaxis, links.xaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    if rows * columns <= _WRITTEN_CELLS:
        for row, column in np.argwhere(~np.ma.getmaskarray(matrix)).tolist():
            value = float(matrix[row, column])
            dark = float(scale(value)) < _DARK
            pairs.text(
                train + column,
                row,
                size(value),
                ha="center",
                va="center",
                fontsize=8,
                color="white" if dark else "black",
            )
    figure.colorbar(image, ax=pairs, format=lambda value, _: size(value))
    _draw_links(study, links)
    figure.suptitle(_title(study))
    figure.savefig(path, dpi=110)


def _draw_links(study: Study, links: Any) -> None:
    by_way = _links_by_way(study)
    for label, times in by_way.items():
        # The two directions of a link often take as long: the dashes and hollow marks of one let the other through.
        inward = label.endswith(" in")
        links.plot(
            range(1, len(times) + 1),
            sorted(times, reverse=True),
            "--" if inward else "-",
            marker="s" if inward else "o",
            markersize=9 if inward else 5,
            markerfacecolor="none" if inward else None,
            markevery=max(1, len(times) // 16),
            label=label,
        )
    links.axhline(
        study.analysis.bound_seconds, color="black", linestyle=":", label="speed of light T", zorder=1
    )
    links.set(xlabel="links, busiest first", ylabel="seconds", title="time of each link")
    links.set_ylim(
        0, 1.1 * max([study.analysis.bound_seconds, *(t for times in by_way.values() for t in times)])
    )
    links.legend()


def _links_by_way(study: Study) -> dict[str, list[float]]:
    """Seconds of the links by what they are: the name without the rank or host."""
    found: dict[str, list[float]] = {}
    for link in study.analysis.links:
        kind, _, rest = link.name.partition(" ")
        label = f"{kind}s' {rest.partition(' ')[2]}"
        found.setdefault(label, []).append(link.seconds)
    return found


def _page(study: Study) -> str:
    matrix = _matrix(study)
    analysis = study.analysis
    largest = int(matrix.max()) if matrix.size else 0
    levels = np.zeros(matrix.shape, dtype=np.uint8)
    if largest:
        # Level 0 is for pairs that exchange nothing.
        levels = np.where(matrix > 0, 1 + np.floor(matrix * (254 / largest)), 0).astype(np.uint8)
    links = sorted(analysis.links, key=lambda link: -link.seconds)[:200]
    data: dict[str, Any] = {
        "rows": matrix.shape[0],
        "columns": matrix.shape[1],
        "train": analysis.train_ranks,
        "hosts": list(analysis.topology.host_of),
        "largest": largest,
        "levels": base64.b64encode(levels.tobytes()).decode(),
        "megabytes": (matrix / 1e6).round(3).tolist(),
    }
    rows = "".join(
        f"<tr><td>{html.escape(link.name)}<td>{size(link.nbytes)}<td>{link.rate_gb_per_s:g}<td>{seconds(link.seconds)}"
        f'<td><div class="bar" style="width:{100 * link.seconds / links[0].seconds:.1f}%"></div>'
        for link in links
    )
    # "</" would end the script, whatever string it stands in.
    payload = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    return (
        _PAGE.replace("@title@", html.escape(_title(study)))
        .replace("@links@", _LINKS.replace("@rows@", rows))
        .replace("@data@", payload)
    )


_LINKS = """<h3>Bytes per link, busiest first</h3>
<table><tr><th>link<th>bytes<th>GB/s<th>time<th>share of the busiest</tr>@rows@</table>"""

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>@title@</title>
<style>
body{font:14px system-ui,sans-serif;margin:2em;color:#222;background:#fff}
canvas{border:1px solid #999;image-rendering:pixelated;display:block}
table{border-collapse:collapse;margin-top:1em}td,th{padding:2px 10px;text-align:right;border-bottom:1px solid #eee}
td:first-child,th:first-child{text-align:left}td:last-child{width:240px}.bar{height:9px;background:#31688e}
#tip{height:1.5em;font-variant-numeric:tabular-nums}
</style>
<h2>@title@</h2>
<p>Rows send, columns receive; ranks are numbered over the refit, trainers first. Darker is more; white is nothing.</p>
<p id="tip">Point at a cell.</p>
<canvas id="map"></canvas>
@links@
<script>
const d=@data@;
const levels=Uint8Array.from(atob(d.levels),c=>c.charCodeAt(0));
const map=document.getElementById("map"),tip=document.getElementById("tip");
map.width=d.columns;map.height=d.rows;
const scale=Math.max(1,Math.floor(Math.min(1000/d.columns,700/d.rows,24)));
map.style.width=d.columns*scale+"px";map.style.height=d.rows*scale+"px";
const context=map.getContext("2d"),image=context.createImageData(d.columns,d.rows);
for(let i=0;i<levels.length;i++){
  const x=levels[i]/255;
  image.data.set(levels[i]?[235-190*x,240-175*x,250-130*x,255]:[255,255,255,255],4*i);
}
context.putImageData(image,0,0);
map.onmousemove=e=>{
  const c=Math.floor(e.offsetX/scale),r=Math.floor(e.offsetY/scale);
  if(r<0||c<0||r>=d.rows||c>=d.columns)return;
  tip.textContent=`rank ${r} (host ${d.hosts[r]}) to rank ${d.train+c} (host ${d.hosts[d.train+c]}): `+
    `${d.megabytes[r][c]} MB`;
};
</script></html>
"""
