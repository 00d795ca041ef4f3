"""Bytes by pair of ranks and by link, as a picture or as a page that needs nothing beside itself."""

from __future__ import annotations

import base64
import html
import json
from pathlib import Path
from typing import Any

import numpy as np

from .render import seconds, size
from .study import Study


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
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6), layout="constrained")
    FigureCanvasAgg(figure)
    pairs, links = figure.subplots(1, 2, width_ratios=(3, 2))
    # Pairs differ by orders of magnitude; those that exchange nothing stay white.
    matrix = np.ma.masked_equal(_matrix(study) / 1e6, 0.0)
    scale = LogNorm(matrix.min(), matrix.max()) if matrix.count() else None
    colors = colormaps["viridis"].with_extremes(bad="white")
    image = pairs.imshow(matrix, aspect="auto", interpolation="nearest", cmap=colors, norm=scale)
    pairs.set(xlabel="engine rank (of the engines)", ylabel="sending rank (of the refit)", title="MB by pair")
    figure.colorbar(image, ax=pairs, label="MB")
    _draw_links(study, links)
    figure.suptitle(_title(study))
    figure.savefig(path, dpi=110)


def _draw_links(study: Study, links: Any) -> None:
    by_way = _links_by_way(study)
    for label, times in by_way.items():
        # The two directions of a link often take as long: dashes let the other line through.
        style = "--" if label.endswith(" in") else "-"
        links.plot(sorted(times, reverse=True), style, label=label)
    links.axhline(study.analysis.bound_seconds, color="black", linestyle=":", label="speed of light T")
    links.set(xlabel="links, busiest first", ylabel="seconds", title="time of each link", ylim=(0, None))
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
        # A pair that exchanges anything at all is told from one that doesn't.
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
<p>Rows send (refit ranks), columns receive (engine ranks). Darker is more; white is nothing.</p>
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
