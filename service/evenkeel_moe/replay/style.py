"""How the page looks: one palette for light and one for dark, told apart without red against green."""

__all__ = ["CSS", "HUES"]

HUES = {
    "eplb": "hue-0",
    "keel": "hue-1",
    "craft": "hue-2",
    "gem": "hue-3",
    "libra": "hue-4",
}
"""CSS class by policy; baselines are grey and differ by dashes."""

_LIGHT = {
    "paper": "#ffffff", "ink": "#1c2126", "soft": "#5b646e", "grid": "#e4e7ea", "even": "#eef0f2",
    "over": "#b3490b", "under": "#14568f", "hue-0": "#b85c00", "hue-1": "#0063b2", "hue-2": "#00785a",
    "hue-3": "#a33b7d", "hue-4": "#6b5d00", "base": "#7b858f",
}  # fmt: skip
_DARK = {
    "paper": "#14181c", "ink": "#e8ebee", "soft": "#a3adb7", "grid": "#2b3238", "even": "#262c32",
    "over": "#f0883e", "under": "#58a6e6", "hue-0": "#f0923d", "hue-1": "#62b0f5", "hue-2": "#35c79c",
    "hue-3": "#e78bc0", "hue-4": "#d9c650", "base": "#98a2ac",
}  # fmt: skip


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


_HUE_RULES = "".join(
    f".line.hue-{n}{{stroke:var(--hue-{n})}}.dot.hue-{n},.bar.hue-{n}{{fill:var(--hue-{n})}}"
    for n in range(5)
)
_HEAT_RULES = "".join(
    f".{side}{level}{{fill:color-mix(in oklab,var(--{name}) {level * 10}%,var(--even));"
    f"background:color-mix(in oklab,var(--{name}) {level * 10}%,var(--even))}}"
    for side, name in (("o", "over"), ("u", "under"))
    for level in range(1, 11)
)

CSS = f"""
:root{{{_variables(_LIGHT)}}}
@media (prefers-color-scheme: dark){{:root{{{_variables(_DARK)}}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif}}
main{{max-width:1088px;margin:0 auto;padding:24px}}
h1{{font-size:24px;margin:0 0 4px}}h2{{font-size:17px;margin:36px 0 2px}}
p{{margin:2px 0 10px;color:var(--soft);max-width:76ch}}
svg{{width:100%;height:auto;display:block}}
text{{font:12px system-ui,sans-serif;fill:var(--soft)}}
text.name{{fill:var(--ink)}}text.label{{fill:var(--ink)}}
.grid{{stroke:var(--grid)}}.axis{{stroke:var(--soft)}}.mark{{stroke:var(--soft);stroke-dasharray:2 4;opacity:.55}}
.leader{{stroke:var(--soft);fill:none;stroke-width:.7}}
.line{{fill:none;stroke-width:2;stroke-linejoin:round}}
.dot{{stroke:var(--paper);stroke-width:1}}.bar.plain{{fill:var(--hue-1)}}
{_HUE_RULES}
.line.base-initial,.line.base-once,.line.base-ewma{{stroke:var(--base)}}
.dot.base-initial,.dot.base-once,.dot.base-ewma{{fill:var(--base)}}
.line.base-initial{{stroke-dasharray:1.5 4;stroke-linecap:round}}.line.base-once{{stroke-dasharray:7 4}}
.line.base-ewma{{stroke-dasharray:9 3 2 3}}.line.hue-2{{stroke-dasharray:12 3}}.line.hue-3{{stroke-dasharray:4 2}}
.line.hue-4{{stroke-dasharray:10 3 3 3}}.line.solid{{stroke-dasharray:none}}.line.gated{{stroke-dasharray:2 3}}.dot.gated{{opacity:.6}}
polyline.unjoined{{display:none}}p.facts{{max-width:none}}
.e{{fill:var(--even);background:var(--even)}}{_HEAT_RULES}
.maps{{display:grid;grid-template-columns:repeat(auto-fill,minmax(300px,1fr));gap:20px}}
.legend i{{display:inline-block;width:22px;height:13px;margin:0 1px;vertical-align:-1px}}
.legend i:first-of-type{{margin-left:8px}}.legend i:last-of-type{{margin-right:8px}}
.scroll{{overflow-x:auto}}
table{{border-collapse:collapse;font-variant-numeric:tabular-nums;width:100%;margin:14px 0 6px}}
th,td{{padding:5px 9px;text-align:right;border-bottom:1px solid var(--grid);white-space:nowrap}}
th{{font-weight:600}}thead th{{color:var(--soft);font-size:12.5px;white-space:normal;vertical-align:bottom}}
th:first-child{{text-align:left}}
"""
